"""A drafter for tests on real models: about half of its tokens are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source


@dataclass
class HalfRight:
    """Proposes each token of the known outputs with probability `right`, else a random one.

    `answers` holds what plain decoding gives, one list a sequence, in the order of `start`.
    """

    answers: Sequence[Sequence[int]]
    vocabulary: int
    right: float = 0.5
    seed: int = 0
    name: str = "half-right"
    provides = frozenset()
    requires = TargetRequirements()
    drafts_trees = False
    _started: int = field(default=0, init=False)

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> HalfRightSession:
        self._started += 1
        return HalfRightSession(self, self.answers[self._started - 1], len(source.prefix))


@dataclass
class HalfRightSession:
    drafter: HalfRight
    answer: Sequence[int]
    prefix: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.drafter.seed)

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        first, drafted = len(tokens) - self.prefix, []
        while stop.should_draft(DraftState(depth=len(drafted))):
            known = self.answer[first + len(drafted) :]
            right = bool(torch.rand((), generator=self.generator) < self.drafter.right)
            drafted.append(known[0] if known and right else self._random_token())
        return Proposal.chain(torch.tensor(drafted, dtype=torch.long))

    def _random_token(self) -> int:
        return int(torch.randint(self.drafter.vocabulary, (), generator=self.generator))
