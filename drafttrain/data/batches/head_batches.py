"""Batches of hidden states and labels for acceptance heads, straight from the hidden cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from drafttrain.data.batches.examples import Batch
from drafttrain.data.shards.states import HiddenCache


@dataclass(frozen=True)
class HeadBatch(Batch):
    """The drafted positions of some rows, one after the other; there is no padding."""

    hidden: Tensor
    """[N, D] the drafter's states, in the type they are stored in."""
    acceptance: Tensor
    """[N] label P of each position, float32."""


class CachedRows(Dataset):
    """Rows of a cache, fetched a batch at a time by (epoch, row); epoch e reads mix e mod R."""

    def __init__(self, cache: HiddenCache):
        self.cache = cache

    def __len__(self) -> int:
        return len(self.cache.row_numbers)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[HeadBatch]:
        (epoch,) = {epoch for epoch, _ in keys}  # a batch never spans two
        rows = sorted(row for _, row in keys)
        return [HeadBatch(*self.cache.read(epoch % self.cache.manifest.mixes, rows))]

    def lengths(self) -> np.ndarray:
        """Positions of each row, in the mix where it has most: no epoch's batch is larger."""
        return np.max([self.cache.lengths(mix) for mix in range(self.cache.manifest.mixes)], axis=0)


def whole_batch(batches: Sequence[HeadBatch]) -> HeadBatch:
    """The collate function of `CachedRows`: its batches are whole already."""
    (batch,) = batches
    return batch
