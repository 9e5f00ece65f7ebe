"""Plain decoding: the drafter that proposes nothing, so that every round is one target call."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from drafttrain.config.kinds import DrawKind, Evidence
from drafttrain.decoding.roles import DraftRequest, Randomness
from drafttrain.decoding.target_states import TargetRequirements
from drafttrain.decoding.types import Proposal, Sampling, Source


class NoDrafter:
    """Proposes nothing. It keeps no state, so it is its own session."""

    name = "none"
    provides: frozenset[Evidence] = frozenset({"logits", "hidden", "expected"})
    """All there is to see of no draft: any stop policy goes with it."""
    requires = TargetRequirements()
    branches = False

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic"

    def start(self, sampling: Sampling) -> NoDrafter:
        return self

    def enter(self, row: int, source: Source, randomness: Randomness) -> None:
        """Nothing is kept of a sequence."""

    def leave(self, row: int) -> None:
        """Nothing was kept."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [_NOTHING] * len(requests)


_NOTHING = Proposal.empty()


def open_drafter(nothing: None, target: PreTrainedModel | None) -> NoDrafter:
    """What the kind's row opens it with."""
    return NoDrafter()
