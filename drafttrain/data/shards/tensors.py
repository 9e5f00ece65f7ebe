"""Safetensors shards: rows of different lengths, one after the other.

A shard holds `lengths` [rows] and columns [N, ...], N the sum of the lengths. Several groups of
these may share a shard; a group's name then stands before the names of its tensors: `0.lengths`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.config.base import ConfigError
from drafttrain.data.shards.store import ShardManifest
from drafttrain.data.shards.writing import renamed_when_whole

REMEDY = "delete it and run the same command again: the other shards stay"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One shard, whole or not at all."""
    with renamed_when_whole(path) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary)


@dataclass(frozen=True)
class TensorRows:
    """Rows of all shards of a folder; their files are mapped into memory, not read."""

    shards: Sequence[Mapping[str, Tensor]]
    """The columns of each shard."""
    lengths: np.ndarray
    """[rows]"""
    places: np.ndarray
    """[rows, 2] shard of each row, and where its elements begin there."""

    def read(self, rows: Sequence[int], *names: str) -> list[Tensor]:
        """Columns of some rows, in the order given. Shapes: -> [N, ...] for each name."""
        found = []
        for name in names:
            spans = [self.shards[0][name][:0]]
            for (shard, start), length in zip(self.places[rows], self.lengths[rows], strict=True):
                spans.append(self.shards[shard][name][start : start + length])
            found.append(torch.cat(spans))
        return found

    def column(self, name: str) -> list[Tensor]:
        """A whole column, shard by shard."""
        return [shard[name] for shard in self.shards]


def open_tensors(
    folder: Path, manifest: ShardManifest, widths: Mapping[str, tuple[int, ...]], group: str = ""
) -> TensorRows:
    """The rows of a folder whose shards are all there.

    widths: what a column's shape has after N. Raises ConfigError for a file that is damaged or of
    another folder.
    """
    shards, lengths, places = [], [], []
    for shard in range(manifest.shards):
        path, rows = manifest.path(folder, shard), len(manifest.rows_of(shard))
        try:
            tensors = load_file(path)
            columns = {name: tensors[group + name] for name in ("lengths", *widths)}
        except (SafetensorError, OSError, KeyError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); {REMEDY}") from None
        own = columns.pop("lengths").numpy()
        shapes = {name: list(column.shape) for name, column in columns.items()}
        wanted = {name: [int(own.sum()), *width] for name, width in widths.items()}
        if shapes != wanted or len(own) != rows:
            raise ConfigError(
                f"{path} holds {len(own)} rows with tensors of shapes {shapes} where {rows} rows "
                f"with {wanted} belong; {REMEDY}"
            )
        shards.append(columns)
        lengths.append(own)
        places.append(np.stack([np.full(rows, shard), own.cumsum() - own], axis=1))
    return TensorRows(shards, np.concatenate(lengths), np.concatenate(places))
