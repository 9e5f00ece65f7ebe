"""Rounds of sequences that are decoded together, given out sequence by sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import perf_counter

from drafttrain.decoding.types import Round


class InOrder:
    """The sequences of a decoder's rounds, each with its own rounds, in the order of the sources.

    Rounds of the first sequence that has not ended come as they are done; those of later ones wait
    for their turn.
    """

    def __init__(self, rounds: Iterator[Round], sequences: int, batch_size: int) -> None:
        self._rounds = rounds
        self._sequences = sequences
        self._batch_size = batch_size
        self._waiting: list[deque[Round]] = [deque() for _ in range(sequences)]
        self._entered: list[float] = []
        self._ended: dict[int, float] = {}

    def __iter__(self) -> Iterator[SequenceRounds]:
        return (SequenceRounds(self, number) for number in range(self._sequences))

    @property
    def under_way(self) -> list[int]:
        """Sequences that have entered and not ended."""
        return [number for number in range(len(self._entered)) if number not in self._ended]

    def rounds_of(self, number: int) -> Iterator[Round]:
        """The rounds of a sequence, as they are done."""
        waiting = self._waiting[number]
        while waiting or (number not in self._ended and self._pull()):
            if waiting:
                yield waiting.popleft()

    def seconds_of(self, number: int) -> float:
        """Seconds from when a sequence entered to its end, or to now."""
        return self._ended.get(number, perf_counter()) - self._entered[number]

    def _pull(self) -> bool:
        """Take one round more; False where there is none."""
        asked = perf_counter()
        entered = min(self._sequences, len(self._ended) + self._batch_size)
        self._entered += [asked] * (entered - len(self._entered))
        played = next(self._rounds, None)
        if played is None:
            return False
        self._waiting[played.sequence].append(played)
        if played.finished:
            self._ended[played.sequence] = perf_counter()
        return True


class SequenceRounds:
    """The rounds of one sequence, to be gone through once, and how long it took."""

    def __init__(self, whole: InOrder, number: int) -> None:
        self._whole, self._number = whole, number

    def __iter__(self) -> Iterator[Round]:
        return self._whole.rounds_of(self._number)

    @property
    def seconds(self) -> float:
        """From when the sequence entered to its end, other sequences' part of calls included."""
        return self._whole.seconds_of(self._number)
