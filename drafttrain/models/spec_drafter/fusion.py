"""Fusion of the target's hidden states into a Spec-Drafter's embedded tokens.

Each committed token is given the target's last hidden state that it was predicted from (EAGLE,
arXiv 2401.15077, feeds both). Where the first decoder layer is a copy of a later layer of the
target, the linear map is fitted to what the target's layers below it make of the tokens, so that
such a drafter is right about most first slots before any training; else it starts at zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from drafttrain.models.least_squares import RIDGE, LeastSquares

SHORTEST = 1e-12
"""Least length of a state: where there is none it stays 0."""


class StateFusion(nn.Module):
    """A linear map of a target's hidden state and an embedded token; zero until it is fitted."""

    def __init__(self, state_width: int, width: int) -> None:
        super().__init__()
        self.of_state = nn.Linear(state_width, width, bias=False)
        self.of_token = nn.Linear(width, width)

    def start_at_zero(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """What is added to embedded tokens. Shapes: [..., E], zeros where there is no state,
        [..., D] -> [..., D]."""
        return self.of_state(as_long(states, embedded)) + self.of_token(embedded)

    @torch.no_grad()
    def fit(self, sums: LeastSquares) -> None:
        """Take the map with the least squared error; inputs are states and tokens side by side."""
        weights, constant = sums.solve(RIDGE)
        own = self.of_state.in_features
        self.of_state.weight.copy_(weights[:, :own])
        self.of_token.weight.copy_(weights[:, own:])
        self.of_token.bias.copy_(constant)


def as_long(states: Tensor, embedded: Tensor) -> Tensor:
    """States scaled to the length of the embedded tokens: families differ in both by orders of
    magnitude, and one learning rate must suit both. Shapes: [..., E], [..., D] -> [..., E]."""
    states = states.to(embedded.dtype)
    share = (states.shape[-1] / embedded.shape[-1]) ** 0.5  # equal size of their entries
    wanted = share * torch.linalg.vector_norm(embedded, dim=-1, keepdim=True)
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return states * (wanted / length.clamp_min(SHORTEST))


class KnownOutputs(NamedTuple):
    """Outputs that the map is fitted along."""

    source: Tensor
    """[B, S] token ids, or [B, S, E] the target's encoder states."""
    mask: Tensor | None
    """[B, S] 1 where the source is; None: everywhere."""
    tokens: Tensor
    """[B, L] as the decoder reads them, from its start token on."""
    lengths: Tensor
    """[B]"""
    given: Tensor
    """[B] tokens that decoding starts from, after the start token."""


@torch.no_grad()
def read_outputs(
    target: PreTrainedModel, source: Tensor, mask: Tensor | None, tokens: Tensor, layers: bool
) -> BaseModelOutputWithPastAndCrossAttentions:
    """The target's decoder along outputs, in the target's own precision; with `layers`, the output
    of each of them. Shapes: see `KnownOutputs`."""
    masked = {} if mask is None else {"encoder_attention_mask": mask}
    with torch.autocast(tokens.device.type, enabled=False):
        if source.dim() == 2:
            source = target.get_encoder()(source, attention_mask=mask)[0]
        return target.get_decoder()(
            tokens,
            encoder_hidden_states=source.to(target.dtype),
            output_hidden_states=layers,
            use_cache=False,
            **masked,
        )


def states_before_tokens(hidden: Tensor, given: Tensor) -> Tensor:
    """The state that each token was predicted from, the one before its own; zeros at the start
    token and at those that decoding starts from. Shapes: [B, L, E], [B] -> [B, L, E]."""
    places = torch.arange(hidden.shape[1], device=hidden.device)
    return hidden.roll(1, dims=1).where((places > given[:, None])[..., None], 0.0)


@torch.no_grad()
def fit_fusion(drafter: nn.Module, target: PreTrainedModel, outputs: Iterable[KnownOutputs]) -> int:
    """Fit a Spec-Drafter's fusion to the input of the target layer that its first layer is a copy
    of (`DraftShape.fused_layer`). Returns the number of tokens that it was fitted to."""
    sums = LeastSquares.empty(drafter.config.state_width + drafter.width, drafter.width)
    scale = getattr(drafter.get_decoder(), "embed_scale", 1.0)
    for known in outputs:
        read = read_outputs(target, known.source, known.mask, known.tokens, layers=True)
        inside = torch.arange(known.tokens.shape[1], device=known.tokens.device)
        inside = inside < known.lengths[:, None]
        embedded = drafter.embed_tokens(known.tokens)
        states = states_before_tokens(read[0], known.given)
        added = read.hidden_states[drafter.shape.fused_layer] - read.hidden_states[0]
        inputs = torch.cat((as_long(states, embedded), embedded), dim=-1)
        sums.add(inputs[inside].cpu(), (added.to(embedded.dtype) / scale)[inside].cpu())
    drafter.fusion.fit(sums)
    return sums.count
