"""The shared calls of a model that answers one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.decoding.engine.calls import StepOutput
from drafttrain.decoding.target_states import TargetRequirements


class OneByOne:
    """Gives a model with the calls of `CachedModel` for one sequence those for several."""

    requires = TargetRequirements()
    """What it reads of the target, where it drafts for one."""

    def encode_all(self, sources: Sequence[Any]) -> list[Any]:
        return [self.encode(source) for source in sources]

    def catch_up_all(self, asked: Sequence[tuple]) -> list[StepOutput]:
        return [self.catch_up(*one) for one in asked]

    def feed_chains(self, asked: Sequence[tuple]) -> list[StepOutput]:
        return [self.feed(*one) for one in asked]

    def extend_all(self, asked: Sequence[tuple]) -> list[StepOutput]:
        return [self.extend(*one) for one in asked]

    def score_all(self, asked: Sequence[tuple]) -> list[StepOutput]:
        return [self.score([state], [tokens], [draft])[0] for state, tokens, draft in asked]
