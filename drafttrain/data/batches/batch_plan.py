"""Which rows make a batch: token budget, like lengths, the same for any number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ALIKE = 0.06
"""Rows whose lengths differ by about this share at most count as of the same length."""


@dataclass(frozen=True)
class BatchPlan:
    """Which rows make up batch number g of a training run, for every g.

    Rows are sorted by length with ties in an order of their own each epoch, cut into batches of at
    most `batch_tokens` (rows x longest row), and the batches are shuffled. All of it follows from
    (seed, epoch), so a run can be resumed at any batch and shared out over any number of processes.
    Where source and output are padded apart, a batch costs rows x (longest source + longest
    output), and rows of about the same length are sorted by their sources.
    """

    lengths: np.ndarray
    """[rows], or [rows, 2] of what is padded apart: source and output."""
    batch_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.lengths) == 0:
            raise ValueError("no rows to train on; see the manifest for rows that were left out")
        if 2 * len(self.kept) < len(self.lengths):
            row = int(np.argmax(~np.isin(np.arange(len(self.lengths)), self.kept)))
            raise ValueError(
                f"most rows are longer than train.batch_tokens={self.batch_tokens}, as row {row} "
                f"with {int(self.totals[row])} tokens; raise it, the distilled outputs stay"
            )

    @cached_property
    def totals(self) -> np.ndarray:
        """[rows] tokens of a row, what is padded apart together."""
        return self.lengths.reshape(len(self.lengths), -1).sum(1)

    @cached_property
    def kept(self) -> np.ndarray:
        """Rows that a batch can hold, in rising order; longer ones are left out."""
        return np.flatnonzero(self.totals <= self.batch_tokens)

    def left_out(self) -> str:
        """Says which rows are left out; empty where none is."""
        count, row = len(self.lengths) - len(self.kept), int(self.totals.argmax())
        if not count:
            return ""
        return (
            f"{count} of {len(self.lengths)} rows are longer than train.batch_tokens="
            f"{self.batch_tokens} and left out, the longest row {row} with "
            f"{int(self.totals[row])} tokens"
        )

    @property
    def batches_per_epoch(self) -> int:
        return len(self._edges())

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """All batches of an epoch, in order of use."""
        random = np.random.default_rng((self.seed, epoch))
        order = self.kept[np.lexsort((random.random(len(self.kept)), *self._sort_keys()))]
        batches = [order[start:end] for start, end in self._edges()]
        return [batches[i] for i in random.permutation(len(batches))]

    def stream(self, numbers: Iterable[int]) -> Iterator[list[tuple[int, int]]]:
        """(epoch, row) pairs of the batches of these rising numbers, counted over the whole run."""
        per_epoch = self.batches_per_epoch
        epoch, batches = -1, []
        for number in numbers:
            if number // per_epoch != epoch:
                epoch = number // per_epoch
                batches = self.epoch(epoch)
            yield [(epoch, int(row)) for row in batches[number % per_epoch]]

    def _edges(self) -> list[tuple[int, int]]:
        ordered = self.kept[np.lexsort(self._sort_keys())]
        lengths = self.lengths[ordered].reshape(len(ordered), -1)
        edges, start = [], 0
        longest = lengths[0]
        for end in range(1, len(lengths) + 1):
            if end < len(lengths):
                with_next = np.maximum(longest, lengths[end])
                if with_next.sum() * (end + 1 - start) <= self.batch_tokens:
                    longest = with_next
                    continue
                longest = lengths[end]
            edges.append((start, end))
            start = end
        return edges

    def _sort_keys(self) -> tuple[np.ndarray, ...]:
        """Keys of the sorted order, the last one first. Rows with the same keys are as long."""
        totals = self.totals[self.kept]
        if self.lengths.ndim == 1:
            return (totals,)
        alike = np.floor(np.log(totals) / ALIKE).astype(int)
        sources = self.lengths[self.kept, 0]
        there_and_back = np.where(alike % 2 == 0, sources, -sources)  # no jump between groups
        return totals, there_and_back, alike
