"""Wrapped drafters whose calls and results can be inspected."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from drafttrain.decoding.batching import BatchedSteps
from drafttrain.decoding.roles import Drafter, DraftSession, Randomness, StopPolicy
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Proposal, Sampling, Source

Watch = Callable[
    [DraftSession, Source, Tensor, TargetState | None, StopPolicy], BatchedSteps[Proposal]
]
"""(inner session, source, arguments of `propose`) -> the result of `propose`."""


class Watched:
    """A drafter whose sessions call `watch` in place of `propose`."""

    def __init__(self, inner: Drafter, watch: Watch) -> None:
        self.inner, self.watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> SimpleNamespace:
        session = self.inner.open(source, sampling, randomness)
        return SimpleNamespace(propose=lambda *given: self.watch(session, source, *given))
