"""Batches of a training process: made by workers ahead of the steps, or between them.

What a batch holds follows from (seed, epoch, row) alone, so it is the same whoever makes it.
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
"""(epoch, row) of the rows of a batch."""


def load_batches(
    rows: Dataset, collate: Callable[..., Batch], keys: Iterable[Keys], workers: int, pin: bool
) -> DataLoader:
    """The batches of these keys, made by worker processes ahead of time, or when they are needed.

    pin: put into page-locked memory, from which copies to a GPU are not waited for.
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
    """In a worker: Ctrl-C is for the process that trains, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Waiting:
    """Batches, and the time that the loop waits for them."""

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
        """Since the beginning, and of waiting."""
        return perf_counter() - self._began, self._waited
