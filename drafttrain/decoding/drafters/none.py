"""Plain decoding: the drafter that proposes nothing, so that every round is one target call."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.kinds import DrawKind, Evidence
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import Proposal, Sampling, Source


class NoDrafter:
    """Proposes nothing. It keeps no state, so it is its own session."""

    name = "none"
    provides: frozenset[Evidence] = frozenset()
    requires = TargetRequirements()
    branches = False

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> NoDrafter:
        return self

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        return _NOTHING


_NOTHING = Proposal.empty()


def open_drafter(nothing: None, target: PreTrainedModel | None) -> NoDrafter:
    """What the kind's row opens it with."""
    return NoDrafter()
