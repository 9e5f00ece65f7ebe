"""Safetensors shards: rows of different lengths, one after the other.

A shard holds `lengths` [rows] and columns [N, ...], N the sum of the lengths. Several groups of
these may share a shard; a group's name then stands before the names of its tensors: `0.lengths`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.config.base import ConfigError
from drafttrain.data.shards.store import ShardManifest
from drafttrain.data.shards.writing import renamed_when_whole

REMEDY = "delete it and run the same command again: the other shards stay"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One shard, whole or not at all."""
    with renamed_when_whole(path) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary)


@dataclass
class TensorRows:
    """Rows of all shards of a folder, read a few at a time from memory-mapped files."""

    files: Sequence[Path]
    group: str
    """Put before the names of tensors."""
    lengths: np.ndarray
    """[rows]"""
    starts: np.ndarray
    """[shards + 1] first element of each shard, counted over all shards."""
    _open: dict[int, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._ends = self.lengths.cumsum()

    def read(self, rows: Sequence[int], *names: str) -> list[Tensor]:
        """Columns of some rows, in the order given; neighbours are read in one piece.

        Shapes: -> [N, ...] for each name.
        """
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        spans = [span for run in runs if len(run) for span in self._spans(run[0], run[-1])]
        pieces = [
            [self._file(shard).get_slice(self.group + name)[span] for shard, span in spans]
            for name in names
        ]
        if not spans:
            pieces = [[self._file(0).get_slice(self.group + name)[0:0]] for name in names]
        return [torch.cat(own) for own in pieces]

    def column(self, name: str) -> list[Tensor]:
        """A whole column, shard by shard."""
        files = map(self._file, range(len(self.files)))
        return [file.get_tensor(self.group + name) for file in files]

    def _spans(self, first: int, last: int) -> list[tuple[int, slice]]:
        """Where rows first..last lie: shards, and the elements in each."""
        begin, end = int(self._ends[first] - self.lengths[first]), int(self._ends[last])
        spans = []
        for shard in range(np.searchsorted(self.starts, begin, "right") - 1, len(self.files)):
            start, stop = self.starts[shard : shard + 2].tolist()
            if start >= end:
                break
            if begin < stop:
                spans.append((shard, slice(max(begin, start) - start, min(end, stop) - start)))
        return spans if begin < end else []

    def _file(self, shard: int) -> Any:
        if shard not in self._open:
            self._open[shard] = safe_open(self.files[shard], framework="pt")
        return self._open[shard]


def open_tensors(
    folder: Path, manifest: ShardManifest, widths: Mapping[str, tuple[int, ...]], group: str = ""
) -> TensorRows:
    """The rows of a folder whose shards are all there.

    widths: what a column's shape has after N. Raises ConfigError for a file that is damaged or of
    another folder.
    """
    files = [manifest.path(folder, shard) for shard in range(manifest.shards)]
    found = []
    for shard, path in enumerate(files):
        try:
            with safe_open(path, framework="pt") as file:
                lengths = file.get_tensor(f"{group}lengths").numpy()
                shapes = {name: file.get_slice(group + name).get_shape() for name in widths}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); {REMEDY}") from None
        wanted = {name: [int(lengths.sum()), *width] for name, width in widths.items()}
        rows = len(manifest.rows_of(shard))
        if shapes != wanted or len(lengths) != rows:
            raise ConfigError(
                f"{path} holds {len(lengths)} rows with tensors of shapes {shapes} where {rows} "
                f"rows with {wanted} belong; {REMEDY}"
            )
        found.append(lengths)
    starts = np.concatenate([[0], np.cumsum([lengths.sum() for lengths in found])])
    return TensorRows(files, group, np.concatenate(found), starts)
