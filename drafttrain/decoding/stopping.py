"""Stop policies: how far to draft in a round. None of them sees the token it decides about."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.decoding.types import DraftState, StopPolicy


@dataclass(frozen=True)
class FixedLength:
    """Always k tokens."""

    k: int

    @property
    def name(self) -> str:
        return f"k={self.k}"

    @property
    def longest(self) -> int:
        return self.k

    def admit(self, state: DraftState) -> bool:
        return state.depth < self.k


@dataclass(frozen=True)
class Capped:
    """Another policy, but never more than `limit` tokens (what is left to generate, less one).

    The limit counts tokens and knows none of their values, so it cannot bias the output.
    """

    policy: StopPolicy
    limit: int

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def longest(self) -> int:
        return min(self.policy.longest, self.limit)

    def admit(self, state: DraftState) -> bool:
        return state.depth < self.limit and self.policy.admit(state)
