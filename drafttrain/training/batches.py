"""Loading of batches in a training process, with or without worker processes.

A batch depends only on (seed, epoch, row), so it is the same whichever process creates it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_all_start_methods
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader, Dataset

from drafttrain.data.batches.examples import Batch

Keys = list[tuple[int, int]]
"""(epoch, row) pairs of one batch."""


def load_batches(
    rows: Dataset, collate: Callable[..., Batch], keys: Iterable[Keys], workers: int, pin: bool
) -> DataLoader:
    """Returns a loader of the batches with these keys; workers prepare them ahead of time.

    pin: put batches into page-locked memory, so that copies to a GPU are asynchronous.
    """
    return DataLoader(
        rows,
        batch_sampler=keys,
        collate_fn=collate,
        num_workers=workers,
        multiprocessing_context="fork" if workers and "fork" in get_all_start_methods() else None,
        worker_init_fn=leave_signals,
        pin_memory=pin,
    )


def leave_signals(_: int) -> None:
    """Resets the signal handlers of a worker; the training process handles Ctrl-C and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Waiting:
    """Iterator over batches that measures how long the loop waits for them."""

    def __init__(self, batches: Iterator[tuple[int, Any]]) -> None:
        self._batches, self._waited, self._began = batches, 0.0, perf_counter()

    def __iter__(self) -> Waiting:
        return self

    def __next__(self) -> tuple[int, Any]:
        began = perf_counter()
        batch = next(self._batches)
        self._waited += perf_counter() - began
        return batch

    def seconds(self) -> tuple[float, float]:
        """Returns the seconds since the start, and the seconds spent waiting for batches."""
        return perf_counter() - self._began, self._waited
