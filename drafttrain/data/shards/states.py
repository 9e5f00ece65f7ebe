"""The hidden cache on disk: safetensors shards, one folder a mix, and the manifest beside them.

OUT/mix-0/shard-00000.safetensors, OUT/mix-0/shard-00001.safetensors, ..., OUT/manifest.json. A
shard holds the positions in the loss of `shard_rows` distilled rows, row after row: `hidden`
[N, D], `acceptance` [N] (the label), `rows` [N] (number of the distilled row) and `positions` [N]
(index in the output).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.base import Config, ConfigError
from drafttrain.data.shards import store
from drafttrain.data.shards.store import MANIFEST, ShardManifest, check_finished
from drafttrain.data.shards.writing import renamed_when_whole
from drafttrain.models.draft_states import StateKind
from drafttrain.models.identity import hash_weights


class ModelIdentity(Config):
    """A model by its content; the path is how the user called it."""

    path: str
    weights_sha256: str
    """Of the weights as they were loaded: the type counts."""
    model_type: str

    @staticmethod
    def of(path: str, model: PreTrainedModel) -> ModelIdentity:
        """A model that is loaded; path: as the user called it."""
        return ModelIdentity(
            path=path, weights_sha256=hash_weights(model), model_type=model.config.model_type
        )


class CacheManifest(ShardManifest):
    """What was computed from what, how, and whether it is finished.

    Models and outputs are compared by content, not by path.
    """

    COMMAND: ClassVar[str] = "drafttrain cache"
    VERB: ClassVar[str] = "cache"
    SHARDS: ClassVar[str] = "mix-*"
    MAY_DIFFER: ClassVar[frozenset[str]] = frozenset(
        {"target.path", "drafter.path", "distilled", "versions", "counts", "mean_acceptance"}
    )
    EFFECTS: ClassVar[tuple[str, ...]] = ("hidden_size", "outputs_sha256", "rows")

    state: StateKind
    """What the states are of: a token as it was drawn, a token at its own position, or a slot."""
    target: ModelIdentity
    drafter: ModelIdentity
    hidden_size: int
    tokenizer_sha256: str
    distilled: str
    """Folder of the outputs, as it was given."""
    outputs_sha256: str
    """Of their row numbers, sources and outputs."""
    temperature: float
    """This and the next two: the warping under which the labels were made."""
    top_k: int
    top_p: float
    mixing: float | None
    """r, the share of positions that keep the output's own token; for `token` states only."""
    k: int | None
    """Slots of a block; None for tokens."""
    blocks_per_row: int | None
    """Blocks drawn from each output; None: all of them (and for tokens)."""
    mixes: int
    dtype: str
    """Type of the stored hidden states."""
    seed: int
    batch_tokens: int
    shard_rows: int
    rows: int
    """Distilled rows."""
    versions: dict[str, str]
    counts: tuple[int, ...] | None = None
    """Positions in each mix; None until every shard is there."""
    mean_acceptance: float | None = None
    """Mean label over all mixes."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The warping, as heads record it."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def shard_files(self, folder: Path, shard: int) -> list[Path]:
        return [shard_path(folder, mix, shard) for mix in range(self.mixes)]

    def explain(self, field: str, wanted: CacheManifest) -> str:
        role, _, of_model = field.partition(".")
        if of_model == "weights_sha256":
            first, now = getattr(self, role), getattr(wanted, role)
            return f"the first run's {role} was {first.path!r}, this is {now.path!r}"
        if field == "outputs_sha256":
            return f"the outputs in {wanted.distilled!r} are not those of the first run"
        return ""


@dataclass(frozen=True)
class Labelled:
    """What one distilled row gives to one mix."""

    row: int
    positions: Tensor
    """[N] indices in the output."""
    hidden: Tensor
    """[N, D]"""
    acceptance: Tensor
    """[N]"""


def shard_path(folder: Path, mix: int, shard: int) -> Path:
    return folder / f"mix-{mix}" / f"shard-{shard:05d}.safetensors"


def write_shard(path: Path, labelled: Sequence[Labelled], manifest: CacheManifest) -> None:
    """One shard of one mix, whole or not at all. Raises ConfigError for states out of range."""
    dtype = getattr(torch, manifest.dtype)
    hidden = [torch.empty(0, manifest.hidden_size, dtype=dtype)]
    rows = [torch.empty(0, dtype=torch.int64)]
    acceptance, positions = [torch.empty(0)], [torch.empty(0, dtype=torch.int32)]
    for one in labelled:
        hidden.append(_stored(one, dtype))
        rows.append(torch.full((len(one.positions),), one.row, dtype=torch.int64))
        acceptance.append(one.acceptance.float().cpu())
        positions.append(one.positions.to(torch.int32).cpu())
    columns = {"hidden": hidden, "acceptance": acceptance, "rows": rows, "positions": positions}
    path.parent.mkdir(parents=True, exist_ok=True)
    with renamed_when_whole(path) as temporary:
        save_file({name: torch.cat(parts) for name, parts in columns.items()}, temporary)


def _stored(one: Labelled, dtype: torch.dtype) -> Tensor:
    """A row's hidden states in the type of the file, on the CPU."""
    if not one.hidden.isfinite().all() or not one.acceptance.isfinite().all():
        raise ConfigError(
            f"row {one.row}: hidden states or labels are not finite in {one.hidden.dtype}; try "
            "target.dtype=float32"
        )
    hidden = one.hidden.to(dtype)
    if not hidden.isfinite().all():
        raise ConfigError(
            f"row {one.row}: hidden states of up to {float(one.hidden.abs().max()):g} do not fit "
            f"into {str(dtype).removeprefix('torch.')}; use dtype=float32"
        )
    return hidden.cpu()


def read_cache_manifest(folder: Path | str) -> CacheManifest:
    """The manifest of a hidden cache, finished or not. Raises ConfigError."""
    return store.read_manifest(CacheManifest, folder)


@dataclass
class HiddenCache:
    """A finished cache, read a few rows at a time from memory-mapped files."""

    folder: Path
    manifest: CacheManifest
    row_numbers: np.ndarray
    """[rows] numbers of the distilled rows that gave positions to some mix, in order."""
    _lengths: list[np.ndarray]
    """[rows] positions of each row, for each mix."""
    _starts: list[np.ndarray]
    """[shards + 1] first position of each shard, for each mix."""
    _open: dict[tuple[int, int], Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._ends = [lengths.cumsum() for lengths in self._lengths]

    def lengths(self, mix: int) -> np.ndarray:
        """Positions of each row in a mix, [rows]."""
        return self._lengths[mix]

    def read(self, mix: int, row_indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states [N, D] in the stored type and labels [N] float32 of some rows.

        row_indices count `row_numbers`; the rows come in the order asked for. Neighbours are read
        in one piece.
        """
        pieces = [
            piece
            for run in np.split(row_indices, np.flatnonzero(np.diff(row_indices) != 1) + 1)
            if len(run)
            for piece in self._read_span(mix, int(run[0]), int(run[-1]))
        ]
        if not pieces:
            dtype = getattr(torch, self.manifest.dtype)
            return torch.empty(0, self.manifest.hidden_size, dtype=dtype), torch.empty(0)
        return torch.cat([hidden for hidden, _ in pieces]), torch.cat([p for _, p in pieces])

    def _read_span(self, mix: int, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows first..last of a mix: one piece from each shard that they lie in."""
        ends, starts = self._ends[mix], self._starts[mix]
        begin, end = int(ends[first] - self._lengths[mix][first]), int(ends[last])
        shard = int(np.searchsorted(starts, begin, side="right")) - 1
        while begin < end:
            stop = min(end, int(starts[shard + 1]))
            if stop > begin:
                file, inside = self._file(mix, shard), int(starts[shard])
                span = slice(begin - inside, stop - inside)
                yield file.get_slice("hidden")[span], file.get_slice("acceptance")[span]
            begin, shard = stop, shard + 1

    def _file(self, mix: int, shard: int) -> Any:
        key = mix, shard
        if key not in self._open:
            self._open[key] = safe_open(shard_path(self.folder, mix, shard), framework="pt")
        return self._open[key]


def open_cache(folder: Path | str) -> HiddenCache:
    """A finished cache. Raises ConfigError if it is unfinished, empty or damaged."""
    folder = Path(folder)
    manifest = read_cache_manifest(folder)
    check_finished(folder, manifest)
    rows = [read_column(folder, manifest, mix, "rows") for mix in range(manifest.mixes)]
    counts = tuple(sum(map(len, shards)) for shards in rows)
    if counts != manifest.counts:
        raise ConfigError(
            f"the shards in {str(folder)!r} hold {counts} positions, but its {MANIFEST} says "
            f"{manifest.counts}; cache into another folder"
        )
    check_not_empty(folder, counts)
    joined = [np.concatenate(shards) for shards in rows]
    row_numbers = np.unique(np.concatenate(joined))
    return HiddenCache(
        folder,
        manifest,
        row_numbers,
        [_counts_of(numbers, row_numbers) for numbers in joined],
        [np.concatenate([[0], np.cumsum([len(numbers) for numbers in shards])]) for shards in rows],
    )


def _counts_of(numbers: np.ndarray, row_numbers: np.ndarray) -> np.ndarray:
    found, counts = np.unique(numbers, return_counts=True)
    lengths = np.zeros(len(row_numbers), dtype=np.int64)
    lengths[np.searchsorted(row_numbers, found)] = counts
    return lengths


def check_not_empty(folder: Path, counts: Sequence[int]) -> None:
    """Every mix must have positions to train on. Raises ConfigError."""
    for mix, count in enumerate(counts):
        if count == 0:
            raise ConfigError(
                f"mix {mix} of {str(folder)!r} holds no positions, so no head can be trained on "
                "it; use a smaller mixing=, or more or longer outputs"
            )


def read_column(folder: Path, manifest: CacheManifest, mix: int, name: str) -> list[np.ndarray]:
    """A small tensor of every shard of a mix. Raises ConfigError for a damaged shard."""
    remedy = "delete it and cache again: the other shards stay"
    columns = []
    for shard in range(manifest.shards):
        path = shard_path(folder, mix, shard)
        try:
            with safe_open(path, framework="pt") as file:
                column = file.get_tensor(name).numpy()
                shape = tuple(file.get_slice("hidden").get_shape())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); {remedy}") from None
        if shape != (len(column), manifest.hidden_size):
            raise ConfigError(
                f"{path} holds hidden states of shape {shape} where {len(column)} rows of "
                f"{manifest.hidden_size} belong; {remedy}"
            )
        columns.append(column)
    return columns
