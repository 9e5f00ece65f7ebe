"""A clock of the parts of a round: the calls of models, and what else it does, by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from drafttrain.decoding import loop, verifiers
from drafttrain.decoding.drafters import causal, slots
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.candidates import Link
from drafttrain.decoding.engine.batched import Batched
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import RowProcessors
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.types import Source

MODELS = ("target calls", "drafter calls", "encoders", "attention")
"""Parts of a round that are calls of models."""
Spent = dict[str, float]
"""Seconds by part."""


class Clock:
    """Seconds in the parts of a round. A part's time is what no part inside it took."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.rounds: list[Spent] = []
        """Of each round, with what came between it and the one before."""
        self._parts = ["between rounds"]
        self._spent: Spent = defaultdict(float)
        self._since = now()

    def phase(self, part: str) -> None:
        """What the time belongs to from now on, where it belongs to no part inside."""
        self._charge()
        self._parts[0] = part

    def timed(self, owner: Any, name: str, part: str | Callable[[Any], str]) -> Any:
        """A patch under which a function's time is a part; a method's may depend on its owner."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            self._charge()
            self._parts.append(part if isinstance(part, str) else part(arguments[0]))
            try:
                return function(*arguments, **named)
            finally:
                self._charge()
                self._parts.pop()

        return patch.object(owner, name, timed)

    def phased(self, owner: Any, name: str, during: str, after: str, of: Any = None) -> Any:
        """A patch that changes the phase while a function runs, and behind it."""
        function = getattr(owner, name)

        def phased(*arguments: Any, **named: Any) -> Any:
            if of is not None and arguments[0] is not of:
                return function(*arguments, **named)
            self.phase(during)
            try:
                return function(*arguments, **named)
            finally:
                self.phase(after)

        return patch.object(owner, name, phased)

    def next_round(self) -> None:
        self._charge()
        self.rounds.append(dict(self._spent))
        self._spent.clear()

    def _charge(self) -> None:
        now = self.now()
        self._spent[self._parts[-1]] += now - self._since
        self._since = now


def models_timed(clock: Clock, decoder: Decoder) -> Iterator[Any]:
    """Patches for the calls of models."""
    target = decoder.target.engine

    def whose(engine: Any) -> str:
        return "target calls" if engine is target else "drafter calls"

    yield clock.timed(Batched, "call", whose)
    yield clock.timed(Batched, "begin", "encoders")
    yield clock.timed(BlockHeadsDrafter, "rows_all", "drafter calls")


def causes_timed(clock: Clock, decoder: Decoder) -> Iterator[Any]:
    """Patches for what lies outside: the phases of a round, and what costs most within them."""
    target = decoder.target
    yield clock.phased(loop, "play_round", "drafting", "between rounds")
    yield clock.phased(CachedModel, "score", "laying out the draft", "verification", target)
    yield clock.phased(CachedModel, "keep", "commit", "commit", target)
    yield clock.timed(Link, "chains", "choosing draft tokens")
    for module in (slots, causal):
        yield clock.timed(module, "arg_max_of_each", "choosing draft tokens")
    yield clock.timed(verifiers, "arg_max_of_each", "the target's arg-max")
    for module in (slots, causal, verifiers):
        yield clock.timed(module, "warp", "warping")
    for name in ("categorical", "accept_run"):
        yield clock.timed(SampledRandomness, name, "random draws")
    for name in ("align", "gather"):
        yield clock.timed(SequenceState, name, "cached tokens")
    yield clock.timed(StopPolicy, "should_draft", "stop policy")
    yield clock.timed(RowProcessors, "__call__", "logits processors")


@contextmanager
def patched(patches: Iterator[Any]) -> Iterator[None]:
    with ExitStack() as entered:
        for one in patches:
            entered.enter_context(one)
        yield


def play(
    clock: Clock, decoder: Decoder, sources: Sequence[Source], batch_size: int, most: int
) -> list[Spent]:
    """Decode, and have a record of each round of the batch."""
    play_round = loop.play_round

    def recorded(*arguments: Any) -> Any:
        try:
            return play_round(*arguments)
        finally:
            clock.next_round()

    with patch.object(loop, "play_round", recorded):
        for _ in decoder.decode(sources, most, batch_size):
            pass
    return clock.rounds
