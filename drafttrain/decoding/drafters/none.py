"""Plain decoding: a drafter that proposes nothing, so each round is one target forward pass."""

from __future__ import annotations

from torch import Tensor

from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Proposal, Sampling, Source

NOTHING = Proposal.empty()


class NoDrafter(Drafter):
    """Proposes nothing. It has no state, so it is its own session."""

    name = "none"

    def __init__(self, *unused: object) -> None:
        """Ignores the model and the target that other kinds are made from."""

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> NoDrafter:
        return self

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        return NOTHING
