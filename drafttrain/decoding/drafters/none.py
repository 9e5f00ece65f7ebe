"""Plain decoding: the drafter that proposes nothing, so that every round is one target call."""

from __future__ import annotations

from torch import Tensor

from drafttrain.decoding.types import (
    DrawKind,
    Evidence,
    Proposal,
    Randomness,
    Sampling,
    Source,
    StopPolicy,
    TargetState,
)


class NoDrafter:
    """Proposes nothing. It keeps no state, so it is its own session for every sequence."""

    name = "none"
    provides: frozenset[Evidence] = frozenset()
    branches = False

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic"

    def start(self, source: Source, sampling: Sampling, randomness: Randomness) -> NoDrafter:
        return self

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        return _NOTHING


_NOTHING = Proposal.empty()
