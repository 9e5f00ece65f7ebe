"""What a Spec-Drafter's tokens are told of the target's states, and how that starts.

A decoder of the target's last layer gets, in place of what the layers below it would hand up, a
linear map of the state that a token was predicted from and of the token itself (EAGLE, arXiv
2401.15077, feeds both). It is fitted to what the target's own layers hand up, so that such a
drafter is right about most first slots before any training. One that starts from the first layer
too is handed the tokens as that is, and is told nothing until it has learned.
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
"""Length that a state is taken to have at least: where there is none it stays 0."""


class Told(nn.Module):
    """A linear map of a state of the target's and an embedded token; zero until it is fitted."""

    def __init__(self, state_width: int, width: int):
        super().__init__()
        self.of_state = nn.Linear(state_width, width, bias=False)
        self.of_token = nn.Linear(width, width)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Shapes: [..., E], zeros where there is none, [..., D] -> [..., D]."""
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
    """States at the length of the embedded tokens: families differ in both by orders of magnitude,
    and what is learned at one rate must not drown what is there. Shapes: [..., E], [..., D]."""
    states = states.to(embedded.dtype)
    share = (states.shape[-1] / embedded.shape[-1]) ** 0.5  # of lengths, where numbers are as large
    wanted = share * torch.linalg.vector_norm(embedded, dim=-1, keepdim=True)
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return states * (wanted / length.clamp_min(SHORTEST))


class Fitted(NamedTuple):
    """Outputs that maps are fitted along."""

    source: Tensor
    """[B, S] token ids, or [B, S, E] what the target's encoder made of them."""
    mask: Tensor | None
    """[B, S] 1 where the source is; None: everywhere."""
    tokens: Tensor
    """[B, L] as the decoder reads them, from its start token on."""
    lengths: Tensor
    """[B]"""
    given: Tensor
    """[B] tokens that decoding starts from, behind the start token."""


@torch.no_grad()
def read_outputs(
    target: PreTrainedModel, source: Tensor, mask: Tensor | None, tokens: Tensor, layers: bool
) -> BaseModelOutputWithPastAndCrossAttentions:
    """What the target's decoder makes of outputs, in the target's own precision; with layers, of
    each of them. Shapes: see `Fitted`."""
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


def states_in_front(hidden: Tensor, given: Tensor) -> Tensor:
    """The state that each token was predicted from: the one before its own; zeros with the start
    token and those that decoding starts from. Shapes: [B, L, E], [B] -> [B, L, E]."""
    places = torch.arange(hidden.shape[1], device=hidden.device)
    return hidden.roll(1, dims=1).where((places > given[:, None])[..., None], 0.0)


@torch.no_grad()
def fit_told(drafter: nn.Module, target: PreTrainedModel, outputs: Iterable[Fitted]) -> int:
    """Fit a Spec-Drafter's map to what the target hands the layer that its first one is a copy of.
    Returns the tokens that it took."""
    config, layer = drafter.config, drafter.config.told_layer
    sums = LeastSquares.empty(config.state_width + config.d_model, config.d_model)
    start, was_training = drafter.decoder.start, drafter.training
    drafter.eval()
    for given in outputs:
        read = read_outputs(target, given.source, given.mask, given.tokens, layers=True)
        positions = torch.arange(given.tokens.shape[1], device=given.tokens.device)
        there = positions < given.lengths[:, None]
        embedded = drafter.embed(given.tokens)
        states = states_in_front(read[0], given.given)
        wanted = read.hidden_states[layer].to(embedded.dtype) - start(embedded, positions[None])
        inputs = torch.cat((as_long(states, embedded), embedded), dim=-1)
        sums.add(inputs[there].cpu(), wanted[there].cpu())
    drafter.told.fit(sums)
    drafter.train(was_training)
    return sums.count
