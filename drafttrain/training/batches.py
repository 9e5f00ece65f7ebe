"""Batches of a training process: made by workers ahead of the steps, or between them.

What a batch holds follows from (seed, epoch, row) alone, so it is the same whoever makes it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_all_start_methods
from time import perf_counter
from typing import Any

import datasets
from torch.utils.data import DataLoader, Dataset

from drafttrain.data.batches.batch_plan import BatchPlan
from drafttrain.data.batches.examples import Batch, Examples


def fetchable(rows: datasets.Dataset | Dataset) -> Dataset:
    """Rows that are fetched by (epoch, row)."""
    return Examples(rows) if isinstance(rows, datasets.Dataset) else rows


@dataclass(frozen=True)
class Share:
    """Keys of a process's batches among first..last-1, in order."""

    plan: BatchPlan
    first: int
    last: int
    rank: int
    world: int

    @property
    def numbers(self) -> range:
        """Numbers of the batches, counted over the whole run."""
        return range(self.first + self.rank, self.last, self.world)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return islice(self.plan.stream(self.first, self.last), self.rank, None, self.world)


def load_batches(
    rows: Dataset, collate: Callable[..., Batch], share: Share, workers: int, pin: bool
) -> DataLoader:
    """The batches of a share, made by so many processes ahead of time, or as they are asked for.

    pin: put into page-locked memory, from which copies to a GPU are not waited for.
    """
    return DataLoader(
        rows,
        batch_sampler=share,
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
    """Batches, and the share of the time that the loop waits for them."""

    def __init__(self, batches: Iterator[tuple[int, Any]]) -> None:
        self._batches, self._waited, self._began = batches, 0.0, perf_counter()

    def __iter__(self) -> Waiting:
        return self

    def __next__(self) -> tuple[int, Any]:
        began = perf_counter()
        batch = next(self._batches)
        self._waited += perf_counter() - began
        return batch

    def share(self) -> float:
        """Of the time since the beginning."""
        return self._waited / max(perf_counter() - self._began, 1e-9)
