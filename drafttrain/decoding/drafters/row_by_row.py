"""Sessions of drafters that draft for one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.decoding.roles import DraftRequest, Randomness, SequenceDrafter, SequenceSession
from drafttrain.decoding.types import Proposal, Sampling, Source


class RowByRow:
    """A `DraftSession` that holds a session of its own for every sequence."""

    def __init__(self, drafter: SequenceDrafter, sampling: Sampling) -> None:
        self.drafter, self.sampling = drafter, sampling
        self.sessions: dict[int, SequenceSession] = {}

    def enter(self, row: int, source: Source, randomness: Randomness) -> None:
        self.sessions[row] = self.drafter.open(source, self.sampling, randomness)

    def leave(self, row: int) -> None:
        del self.sessions[row]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [
            self.sessions[asked.row].propose(asked.tokens, asked.target_state, asked.stop)
            for asked in requests
        ]
