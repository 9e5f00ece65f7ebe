"""Storage of the hidden cache: hidden states at the positions in the loss, labels, and batches.

A shard has for each mix the positions of `shard_rows` distilled rows as columns: `hidden` [N, D],
`acceptance` [N] (the label) and `positions` [N] (index in the output).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import CacheConfig
from drafttrain.data.batches.examples import Batch
from drafttrain.data.shards.outputs import WHICH_TARGET, DerivedManifest
from drafttrain.data.shards.store import MANIFEST, TensorRows, open_tensors, write_tensors
from drafttrain.models.identity import ModelIdentity


class CacheManifest(DerivedManifest):
    """Manifest of a hidden cache."""

    COMMAND: ClassVar[str] = "drafttrain cache"
    MAY_DIFFER: ClassVar[frozenset[str]] = (
        DerivedManifest.MAY_DIFFER
        | {"drafter.path", "mean_acceptance"}
        | {"settings.drafter", "settings.distilled", "settings.out"}
        | WHICH_TARGET
    )

    settings: CacheConfig
    drafter: ModelIdentity
    hidden_size: int
    sampling: dict[str, float]
    """The sampling settings of the labels: temperature, top_k, top_p and, unless 0, min_p; heads
    record the same."""
    counts: tuple[int, ...] | None = None
    """Number of positions in each mix; None until all shards exist."""
    mean_acceptance: float | None = None
    """Mean label over all mixes."""

    @property
    def shard_rows(self) -> int:
        return self.settings.shard_rows

    @property
    def mixes(self) -> int:
        return self.settings.mixes


class Labelled(NamedTuple):
    """States [N, D] and labels [N] of one distilled row in one mix, at positions of its output."""

    row: int
    positions: Tensor
    hidden: Tensor
    acceptance: Tensor


def write_states(path: Path, rows: Sequence[Sequence[Labelled]], manifest: CacheManifest) -> None:
    """Writes one shard atomically. rows: the mixes of each distilled row, an empty list for a row
    without positions. Raises ConfigError if states overflow the dtype."""
    dtype, tensors = getattr(torch, manifest.settings.dtype), {}
    for mix in range(manifest.mixes):
        own = [mixes[mix] for mixes in rows if mixes]
        hidden = [one.hidden.to(dtype) for one in own]
        for one, states in zip(own, hidden, strict=True):
            if not states.isfinite().all() or not one.acceptance.isfinite().all():
                raise ConfigError(
                    f"row {one.row}: hidden states of up to {float(one.hidden.abs().max()):g} in "
                    f"{dtype}, or labels, are not finite; use dtype=float32, or "
                    "target.dtype=float32"
                )
        none = torch.empty(0)  # of a shard without positions
        acceptance = torch.cat([none, *(one.acceptance.cpu() for one in own)])
        positions = torch.cat([none.int(), *(one.positions.cpu() for one in own)])
        counts = [len(mixes[mix].positions) if mixes else 0 for mixes in rows]
        tensors |= {
            f"{mix}.lengths": torch.tensor(counts),
            f"{mix}.hidden": torch.cat(hidden or [torch.empty(0, manifest.hidden_size).to(dtype)]),
            f"{mix}.acceptance": acceptance.float(),
            f"{mix}.positions": positions.int(),
        }
    write_tensors(path, tensors)


@dataclass(frozen=True)
class HeadBatch(Batch):
    """The positions in the loss of several rows, concatenated."""

    hidden: Tensor
    """[N, D] the drafter's hidden states, in the stored dtype."""
    acceptance: Tensor
    """[N] label P of each position, float32."""


@dataclass(frozen=True)
class HiddenCache(Dataset):
    """A finished cache, read a batch of rows at a time."""

    manifest: CacheManifest
    mixes: Sequence[TensorRows]
    rows: np.ndarray
    """Indices of the distilled rows with positions in any mix: the rows of the cache."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[HeadBatch]:
        """Reads (epoch, row) keys as a list of one batch; epoch e reads mix e mod R."""
        (epoch,) = {epoch for epoch, _ in keys}  # a batch never spans two epochs
        rows = sorted(row for _, row in keys)
        return [HeadBatch(*self.read(epoch % self.manifest.mixes, rows))]

    def read(self, mix: int, numbers: Sequence[int]) -> list[Tensor]:
        """Reads hidden states [N, D] in the stored dtype and labels [N] float32 of some `rows`."""
        return self.mixes[mix].read(self.rows[list(numbers)], "hidden", "acceptance")

    def lengths(self) -> np.ndarray:
        """Returns the largest number of positions of each row in any mix, which bounds the batches
        of every epoch. Shapes: -> [rows]."""
        return np.max([one.lengths[self.rows] for one in self.mixes], axis=0)


def read_states(folder: Path, manifest: CacheManifest) -> list[TensorRows]:
    """Opens all mixes of a folder with complete shards. Raises ConfigError for a damaged shard and
    for a mix without positions."""
    widths = {"hidden": (manifest.hidden_size,), "acceptance": (), "positions": ()}
    mixes = [open_tensors(folder, manifest, widths, f"{mix}.") for mix in range(manifest.mixes)]
    for mix, rows in enumerate(mixes):
        if not rows.lengths.any():
            raise ConfigError(
                f"mix {mix} of {str(folder)!r} holds no positions, so no head can be trained on "
                "it; use a smaller mixing=, or more or longer outputs"
            )
    return mixes


def open_cache(folder: Path) -> HiddenCache:
    """Opens a finished cache. Raises ConfigError if it is unfinished, empty or damaged."""
    manifest = CacheManifest.read_finished(folder)
    mixes = read_states(folder, manifest)
    counts = tuple(int(rows.lengths.sum()) for rows in mixes)
    if counts != manifest.counts:
        raise ConfigError(
            f"the shards in {str(folder)!r} hold {counts} positions, but its {MANIFEST} says "
            f"{manifest.counts}; cache into another folder"
        )
    used = np.flatnonzero(np.any([rows.lengths for rows in mixes], axis=0))
    return HiddenCache(manifest, mixes, used)
