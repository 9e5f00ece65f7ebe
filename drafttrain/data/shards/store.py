"""A folder of shards with a manifest; shards of tensors.

A file with its final name is complete. The manifest is written first, without `counts`, and
completed when all shards exist. A folder can only be continued with the settings it was begun with.
The processes of a launch, on one machine or several, divide the missing shards among themselves.

A shard of tensors has `lengths` [rows] and columns [N, ...], N the sum of the lengths. A shard may
have several groups of these; the group's name is then a prefix of its tensors' names: `0.lengths`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from drafttrain.config.base import Config, ConfigError, Interrupted
from drafttrain.config.progress import tracking
from drafttrain.config.reading import first_problem
from drafttrain.data.shards.writing import (
    only_writer,
    remove_leftovers,
    renamed_when_whole,
    say,
    write_file,
)

MANIFEST = "manifest.json"
REMEDY = "delete it and run the same command again: the other shards stay"
"""For damaged shards."""


class ShardManifest(Config):
    """Base class for a folder's manifest: inputs, settings, and whether the folder is finished.

    Subclasses declare the fields, causes before their effects, so that errors name the cause. All
    have `rows` (of the input), `shard_rows` (rows per shard) and `counts` (None until complete).
    """

    COMMAND: ClassVar[str]
    """Command that creates such a folder, e.g. `drafttrain distill`."""
    VERB: ClassVar[str]
    """Verb for the command in messages: distil, cache."""
    SUFFIX: ClassVar[str]
    """Suffix of the shards: parquet or safetensors."""
    SETTING: ClassVar[str] = "out"
    """Name of the setting for the folder."""
    MAY_DIFFER: ClassVar[frozenset[str]]
    """Fields, with dotted names in groups, that a resumed run may change."""

    @property
    def shards(self) -> int:
        return -(-self.rows // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """Returns the row numbers of a shard, from 0; the last shard may have fewer rows."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.rows))

    @classmethod
    def path(cls, folder: Path, shard: int) -> Path:
        return folder / f"shard-{shard:05d}.{cls.SUFFIX}"

    def missing(self, folder: Path) -> list[int]:
        """Returns the numbers of the shards that do not exist yet."""
        return [n for n in range(self.shards) if not self.path(folder, n).is_file()]

    def existing(self, folder: Path) -> str:
        """Returns the number of existing shards, for messages."""
        return f"{self.shards - len(self.missing(folder))} of {self.shards} shards"

    def finished(self, folder: Path) -> bool:
        """Whether all shards exist and are counted."""
        return self.counts is not None and not self.missing(folder)

    @classmethod
    def read(cls, folder: Path | str) -> Self:
        """Reads the manifest of a folder, finished or not. Raises ConfigError."""
        path = Path(folder) / MANIFEST
        if not path.is_file():
            raise ConfigError(
                f"{str(folder)!r} holds no {MANIFEST}; make it with `{cls.COMMAND} --out {folder}`"
            )
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError) as error:
            reason = first_problem(error) if isinstance(error, ValidationError) else error.reason
            raise ConfigError(
                f"{path} is not a manifest of this version ({reason}); {cls.VERB} into another "
                "folder, or delete this one"
            ) from None

    @classmethod
    def read_finished(cls, folder: Path | str) -> Self:
        """Reads the manifest of a finished folder. Raises ConfigError if it is unfinished."""
        manifest = cls.read(folder)
        if not manifest.finished(Path(folder)):
            raise ConfigError(
                f"{str(folder)!r} is unfinished: {manifest.existing(Path(folder))} are there; "
                f"run the same `{cls.COMMAND}` again, it continues"
            )
        return manifest

    def write(self, folder: Path) -> None:
        write_file(folder / MANIFEST, self.model_dump_json(indent=2) + "\n")

    def changed(self, wanted: Self) -> Iterator[tuple[str, Any, Any]]:
        """Yields fields that a resumed run must not change but does, as `differences` does."""
        both = (manifest.model_dump(mode="json") for manifest in (self, wanted))
        return differences(*both, self.MAY_DIFFER)


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str], group: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yields the settings that differ: dotted name, value before, value now. free: names to
    ignore; a name without dots is ignored in every group."""
    for key in {**before, **now}:
        name, old, new = f"{group}{key}", before.get(key), now.get(key)
        if old == new or key in free or name in free:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, free, f"{name}.")
        else:
            yield name, old, new


M = TypeVar("M", bound=ShardManifest)


class Filling(Protocol[M]):
    """The computation that fills a folder with shards."""

    kind: type[M]

    def describe(self) -> M:
        """Returns the manifest of a new folder. Called on the main process, under the lock."""

    def write(self, manifest: M, shard: int, work: tqdm) -> None:
        """Computes and writes one shard; reports finished rows to `work`."""

    def complete(self, manifest: M) -> dict[str, Any]:
        """Returns the manifest's `counts` and other results; called when all shards exist."""

    def report(self, manifest: M) -> str:
        """Describes a finished folder in a line."""


def fill_folder(filling: Filling[M], folder: Path, state: PartialState) -> M:
    """Writes the missing shards and completes the manifest; returns it.

    Shards are divided among the processes by number, so their content does not depend on the number
    of processes. Several launches may open a finished folder at once. Raises ConfigError, before
    anything is written, for a folder begun with other settings, and Interrupted on Ctrl-C.
    """
    kind = filling.kind
    done = (folder / MANIFEST).is_file() and kind.read(folder).finished(folder)
    with ExitStack() as stack:
        if state.is_main_process:
            if not done:
                stack.enter_context(only_writer(folder, kind.SETTING))
            begin_folder(folder, filling.describe())
        state.wait_for_everyone()
        manifest = kind.read(folder)
        missing = manifest.missing(folder)
        state.wait_for_everyone()  # all list before any writes
        mine = missing[state.process_index :: state.num_processes]
        rows, began = sum(len(manifest.rows_of(shard)) for shard in mine), perf_counter()
        try:
            with tracking(rows, manifest.VERB, "row", shown=state.is_main_process) as work:
                for shard in mine:
                    filling.write(manifest, shard, work)
            state.wait_for_everyone()
            made, seconds = sum(len(manifest.rows_of(n)) for n in missing), perf_counter() - began
            if made and state.is_main_process:
                say(f"{folder}: {made:,} rows in {seconds:.0f} s, {made / seconds:.1f} a second")
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted: {manifest.existing(folder)} are in {folder}; run the same command "
                "again to continue"
            ) from None
        if state.is_main_process:
            if not done:
                manifest = manifest.model_copy(update=filling.complete(manifest))
                manifest.write(folder)
            say(f"{folder}: {filling.report(manifest)}")
        state.wait_for_everyone()
    return kind.read(folder)


def begin_folder(folder: Path, wanted: ShardManifest) -> None:
    """Writes a new folder's manifest, or checks an existing one; deletes half-written files. Raises
    ConfigError for other settings and for shards without a manifest."""
    remove_leftovers(folder)
    if (folder / MANIFEST).is_file():
        check_same_settings(folder, wanted.read(folder), wanted)
        return
    if strangers := sorted(path.name for path in folder.glob("shard-*")):
        raise ConfigError(
            f"{str(folder)!r} holds {strangers[0]} but no {MANIFEST}; give another folder with "
            f"{wanted.SETTING}="
        )
    wanted.write(folder)


def check_same_settings(folder: Path, there: M, wanted: M) -> None:
    """Raises ConfigError if a folder was begun with other settings."""
    for field, before, now in there.changed(wanted):
        other = ", another content" if field.endswith("sha256") else ""
        raise ConfigError(
            f"{folder / MANIFEST} was begun with {field} = {before!r}, but the settings now say "
            f"{now!r}{other}; go back to the old value, or give another folder with "
            f"{there.SETTING}="
        )


def check_folder(folder: Path) -> None:
    """Raises ConfigError if the path is a file."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out = {str(folder)!r} is a file; give a folder")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one shard atomically."""
    with renamed_when_whole(path) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary)


@dataclass(frozen=True)
class TensorRows:
    """Rows of all shards of a folder; the files are memory-mapped."""

    shards: Sequence[Mapping[str, Tensor]]
    """The columns of each shard."""
    lengths: np.ndarray
    """[rows] number of elements of each row."""
    offsets: np.ndarray
    """[rows, 2] shard of each row, and index of its first element in that shard."""

    def read(self, rows: Sequence[int], *names: str) -> list[Tensor]:
        """Reads columns of some rows, in the given order. Shapes: -> [N, ...] for each name."""
        spans = [*zip(self.offsets[rows], self.lengths[rows], strict=True)]
        found = []
        for name in names:
            parts = [self.shards[s][name][start : start + count] for (s, start), count in spans]
            found.append(torch.cat([self.shards[0][name][:0], *parts]))
        return found


def open_tensors(
    folder: Path, manifest: ShardManifest, widths: Mapping[str, tuple[int, ...]], group: str = ""
) -> TensorRows:
    """Opens the rows of a folder with complete shards.

    widths: shape of each column after its first dimension, N. Raises ConfigError for a file that is
    damaged or has other shapes.
    """
    shards, lengths, offsets = [], [], []
    for shard in range(manifest.shards):
        path, rows = manifest.path(folder, shard), len(manifest.rows_of(shard))
        try:
            tensors = load_file(path)
            columns = {name: tensors[group + name] for name in ("lengths", *widths)}
        except (SafetensorError, OSError, KeyError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); {REMEDY}") from None
        row_lengths = columns.pop("lengths").numpy()
        shapes = {name: list(column.shape) for name, column in columns.items()}
        wanted = {name: [int(row_lengths.sum()), *width] for name, width in widths.items()}
        if shapes != wanted or len(row_lengths) != rows:
            raise ConfigError(
                f"{path} holds {len(row_lengths)} rows with tensors of shapes {shapes} where "
                f"{rows} rows with {wanted} belong; {REMEDY}"
            )
        shards.append(columns)
        lengths.append(row_lengths)
        offsets.append(np.stack([np.full(rows, shard), row_lengths.cumsum() - row_lengths], axis=1))
    return TensorRows(shards, np.concatenate(lengths), np.concatenate(offsets))
