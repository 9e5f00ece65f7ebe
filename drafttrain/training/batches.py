"""Waiting for batches, and the signals of the worker processes that prepare them."""

import signal
from collections.abc import Iterator
from time import perf_counter
from typing import Any


def leave_signals(_: int) -> None:
    """Resets the signal handlers of a worker; the training process handles Ctrl-C and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Waiting:
    """`next` returns a batch, and measures how long the loop waits for it."""

    def __init__(self, batches: Iterator[tuple[int, Any]]) -> None:
        self._batches, self._waited, self._began = batches, 0.0, perf_counter()

    def __next__(self) -> tuple[int, Any]:
        began = perf_counter()
        batch = next(self._batches)
        self._waited += perf_counter() - began
        return batch

    def seconds(self) -> tuple[float, float]:
        """Returns the seconds since the start, and the seconds spent waiting for batches."""
        return perf_counter() - self._began, self._waited
