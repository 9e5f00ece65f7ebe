"""Batching of rows by length under a token budget, independent of the number of processes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ALIKE = 0.06
"""Relative difference up to which two rows count as about equally long."""


@dataclass(frozen=True)
class BatchPlan:
    """The assignment of rows to the numbered batches of a training run.

    Each epoch sorts the rows by length, with ties in random order, cuts them into batches of at
    most `batch_tokens` (rows x longest row), and shuffles the batches. The result depends only on
    (seed, epoch), so a run can resume at any batch and use any number of processes. If source and
    output are padded separately, a batch costs rows x (longest source + longest output), and rows
    of about the same total length are sorted by source length.
    """

    lengths: np.ndarray
    """[rows], or [rows, 2] for source and output if they are padded separately."""
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
        """[rows] total tokens of each row, source and output together."""
        return self.lengths.reshape(len(self.lengths), -1).sum(1)

    @cached_property
    def kept(self) -> np.ndarray:
        """Rows of at most `batch_tokens` tokens, in ascending order; longer ones are left out."""
        return np.flatnonzero(self.totals <= self.batch_tokens)

    def left_out(self) -> str:
        """Returns a message about the rows that are left out, or "" if there are none."""
        count, row = len(self.lengths) - len(self.kept), int(self.totals.argmax())
        if not count:
            return ""
        return (
            f"{count} of {len(self.lengths)} rows are longer than train.batch_tokens="
            f"{self.batch_tokens} and left out, the longest row {row} with "
            f"{int(self.totals[row])} tokens"
        )

    @cached_property
    def batches_per_epoch(self) -> int:
        return len(self._edges())

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Returns the row indices of every batch of an epoch, in order of use."""
        random = np.random.default_rng((self.seed, epoch))
        order = self.kept[np.lexsort((random.random(len(self.kept)), *self._sort_keys()))]
        batches = [order[start:end] for start, end in self._edges()]
        return [batches[i] for i in random.permutation(len(batches))]

    def stream(self, numbers: Iterable[int]) -> Iterator[list[tuple[int, int]]]:
        """Yields the (epoch, row) pairs of each batch in `numbers`: ascending, run-wide counts."""
        last, batches = -1, []
        for number in numbers:
            epoch, index = divmod(number, self.batches_per_epoch)
            if epoch != last:
                last, batches = epoch, self.epoch(epoch)
            yield [(epoch, int(row)) for row in batches[index]]

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
        """Returns keys for `np.lexsort`, primary key last. Equal keys mean equal lengths."""
        totals = self.totals[self.kept]
        if self.lengths.ndim == 1:
            return (totals,)
        alike = np.floor(np.log(totals) / ALIKE).astype(int)
        sources = self.lengths[self.kept, 0]
        there_and_back = np.where(alike % 2 == 0, sources, -sources)  # snake order, no jumps
        return totals, there_and_back, alike
