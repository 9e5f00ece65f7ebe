"""Families that are not known are tried on a few tokens before anything is decoded with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from drafttrain.decoding.engine.architectures import refuse
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.types import Proposal, Source


class Rows(Protocol):
    logits: Tensor


class Scores(Protocol):
    """What is tried: a `CachedModel`'s round."""

    model: PreTrainedModel

    def encode(self, source: Source) -> SequenceState: ...

    def score(
        self,
        states: Sequence[SequenceState],
        tokens: Sequence[Tensor],
        proposals: Sequence[Proposal],
    ) -> Sequence[Rows]: ...

    def keep(self, state: SequenceState, path: Tensor) -> None: ...


def probe(target: Scores, source: Source, tokens: Tensor) -> None:
    """Draft, keep, draft again, and compare with one pass: a cache that is not plain differs.

    For families that are not known: some feed their last token only, look ahead, or number
    positions by the call. tokens [T] is a path from the source's prefix on. Raises ValueError.
    """
    model = target.model
    length = len(source.prefix)
    state = target.encode(source)
    target.score([state], [tokens[:length]], [Proposal.chain(tokens[-3:])])
    target.keep(state, torch.arange(0))
    target.score([state], [tokens[: length + 1]], [Proposal.chain(tokens[length + 1 : length + 4])])
    target.keep(state, torch.arange(1))
    start = length + 3
    [cached] = target.score([state], [tokens[:start]], [Proposal.chain(tokens[start:])])
    _check_plain(model, state, len(tokens))
    fresh_state = target.encode(source)
    [fresh] = target.score([fresh_state], [tokens[:length]], [Proposal.chain(tokens[length:])])
    seen, expected = cached.logits, fresh.logits[start - length :]
    if seen.shape != expected.shape or not _close(seen, expected):
        refuse(model.config, "with its cache it gives other logits than without")
    [early] = target.score([target.encode(source)], [tokens[:length]], [Proposal.empty()])
    if not _close(early.logits, fresh.logits[:1]):
        refuse(model.config, "its rows depend on tokens that come after them")


def _close(seen: Tensor, expected: Tensor) -> bool:
    """Scores of minus infinity must be equal, and do not count in how far all others spread."""
    seen, expected = seen.float(), expected.float()
    spread = float(expected[expected.isfinite()].std())
    return torch.allclose(seen, expected, rtol=0.02, atol=0.02 * spread)


def _check_plain(model: PreTrainedModel, state: SequenceState, length: int) -> None:
    """The cache must hold every fed token and the cross-attention's own part, nothing else."""
    own = state.columns
    parts = [("self-attention", own.cache, length)]
    if isinstance(own.cache, EncoderDecoderCache):
        parts = [
            ("self-attention", own.cache.self_attention_cache, length),
            ("cross-attention", own.cache.cross_attention_cache, own.encoder_outputs[0].shape[1]),
        ]
    for name, cache, wanted in parts:
        for layer in cache.layers or [None]:
            if type(layer) is not DynamicLayer or layer.get_seq_length() != wanted:
                refuse(model.config, f"its {name} cache does not hold one state a token")
