"""Fusion of the target's hidden states into a Spec-Drafter's token embeddings.

Each committed token is combined with the target's last hidden state that it was predicted from (as
in EAGLE, arXiv 2401.15077). If the first decoder layer is a copy of a later target layer, the
linear map is fitted to the input of that layer in the target; most first slots are then right
before any training. Else the map starts at zero.
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
"""Minimal norm to divide by; missing states stay 0."""


class StateFusion(nn.Module):
    """A linear map of a target's hidden state and a token embedding; zero until it is fitted."""

    def __init__(self, state_width: int, width: int) -> None:
        super().__init__()
        self.of_state = nn.Linear(state_width, width, bias=False)
        self.of_token = nn.Linear(width, width)

    def start_at_zero(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Computes what is added to token embeddings. Shapes: states [..., E], zeros for missing
        ones, embedded [..., D] -> [..., D]."""
        return self.of_state(match_norm(states, embedded)) + self.of_token(embedded)

    @torch.no_grad()
    def fit(self, sums: LeastSquares) -> None:
        """Sets the least squares solution; inputs are concatenated states and token embeddings."""
        weights, constant = sums.solve(RIDGE)
        width = self.of_state.in_features
        self.of_state.weight.copy_(weights[:, :width])
        self.of_token.weight.copy_(weights[:, width:])
        self.of_token.bias.copy_(constant)


def match_norm(states: Tensor, embedded: Tensor) -> Tensor:
    """Scales states to the entry size of the token embeddings.

    Model families differ in both by orders of magnitude, but one learning rate must suit both.
    Shapes: [..., E], [..., D] -> [..., E].
    """
    states = states.to(embedded.dtype)
    ratio = (states.shape[-1] / embedded.shape[-1]) ** 0.5  # equal root mean square of entries
    target_norm = ratio * torch.linalg.vector_norm(embedded, dim=-1, keepdim=True)
    norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return states * (target_norm / norm.clamp_min(SHORTEST))


class KnownOutputs(NamedTuple):
    """A batch of outputs to fit the map on."""

    source: Tensor
    """[B, S] token ids, or [B, S, E] the target's encoder states."""
    mask: Tensor | None
    """[B, S] attention mask of the source; None: no padding."""
    tokens: Tensor
    """[B, L] decoder inputs, starting with the decoder start token."""
    lengths: Tensor
    """[B] number of decoder inputs without padding."""
    given: Tensor
    """[B] number of tokens after the start token that decoding starts from."""


@torch.no_grad()
def read_outputs(
    target: PreTrainedModel, source: Tensor, mask: Tensor | None, tokens: Tensor, layers: bool
) -> BaseModelOutputWithPastAndCrossAttentions:
    """Runs the target's decoder along outputs, in the target's own precision.

    layers: also return the output of each layer. Shapes: see `KnownOutputs`.
    """
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
    """Returns the state that each token was predicted from, which is that of the token before it.

    Zeros for the start token and the given tokens. Shapes: [B, L, E], [B] -> [B, L, E].
    """
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    return hidden.roll(1, dims=1).where((positions > given[:, None])[..., None], 0.0)


@torch.no_grad()
def fit_fusion(drafter: nn.Module, target: PreTrainedModel, outputs: Iterable[KnownOutputs]) -> int:
    """Fits a Spec-Drafter's fusion to the input of the target layer that its first layer copies
    (`DraftShape.fused_layer`). Returns the number of tokens used."""
    sums = LeastSquares.empty(drafter.config.state_width + drafter.width, drafter.width)
    scale = getattr(drafter.get_decoder(), "embed_scale", 1.0)
    for known in outputs:
        output = read_outputs(target, known.source, known.mask, known.tokens, layers=True)
        inside = torch.arange(known.tokens.shape[1], device=known.tokens.device)
        inside = inside < known.lengths[:, None]
        embedded = drafter.embed_tokens(known.tokens)
        states = states_before_tokens(output[0], known.given)
        added = output.hidden_states[drafter.shape.fused_layer] - output.hidden_states[0]
        inputs = torch.cat((match_norm(states, embedded), embedded), dim=-1)
        sums.add(inputs[inside].cpu(), (added.to(embedded.dtype) / scale)[inside].cpu())
    drafter.fusion.fit(sums)
    return sums.count
