"""The target's rows on disk, cut to their likeliest tokens: safetensors shards and their manifest.

FOLDER/shard-00000.safetensors, ..., FOLDER/manifest.json. A shard holds a row for every token of
the outputs of `shard_rows` distilled rows, one output behind the other: `tokens` [N, k], int32, the
likeliest first, and `log_probs` [N, k], float32, or [N, k + 1] where there are more tokens than k:
the last column is of all others together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafttrain.config.base import ConfigError
from drafttrain.data.batches.examples import TopRows
from drafttrain.data.shards import store
from drafttrain.data.shards.states import ModelIdentity
from drafttrain.data.shards.store import ShardManifest, check_finished
from drafttrain.data.shards.writing import renamed_when_whole


class TeacherManifest(ShardManifest):
    """What was computed from what, how, and whether it is finished.

    The target and the outputs are compared by content, not by path.
    """

    COMMAND: ClassVar[str] = "recipes/train_causal_drafter.py"
    VERB: ClassVar[str] = "cache"
    SHARDS: ClassVar[str] = "shard-*.safetensors"
    SETTING: ClassVar[str] = "teacher.folder"
    MAY_DIFFER: ClassVar[frozenset[str]] = frozenset(
        {"target.path", "distilled", "batch_tokens", "versions", "counts", "top_k_share"}
    )
    EFFECTS: ClassVar[tuple[str, ...]] = ("draftable_sha256", "outputs_sha256", "rows")

    target: ModelIdentity
    distilled: str
    """Folder of the outputs, as it was given."""
    outputs_sha256: str
    """Of their row numbers, sources and outputs."""
    top_k: int
    """k, or how many tokens there are, where these are fewer."""
    draftable: int
    """Tokens that the drafter can draft, of which these are the likeliest."""
    draftable_sha256: str | None
    """Of these tokens; None: all of the vocabulary."""
    shard_rows: int
    rows: int
    """Distilled rows."""
    batch_tokens: int
    versions: dict[str, str]
    counts: int | None = None
    """Tokens of all outputs; None until every shard is there."""
    top_k_share: float | None = None
    """Mean probability of the k likeliest tokens together."""

    @property
    def columns(self) -> int:
        """Of `log_probs`."""
        return columns_of(self.top_k, self.draftable)

    def shard_files(self, folder: Path, shard: int) -> list[Path]:
        return [shard_path(folder, shard)]

    def explain(self, field: str, wanted: TeacherManifest) -> str:
        if field == "target.weights_sha256":
            return (
                f"the first run's target was {self.target.path!r}, this is {wanted.target.path!r}"
            )
        if field == "draftable_sha256":
            return "the drafter drafts other tokens (drafter.output_tokens)"
        if field == "outputs_sha256":
            return f"the outputs in {wanted.distilled!r} are not those of the first run"
        return ""


def columns_of(top_k: int, draftable: int) -> int:
    """Columns of log-probabilities: one more than k where other tokens are left."""
    return top_k + (top_k < draftable)


def bytes_a_token(top_k: int, draftable: int) -> int:
    """Disk that a token of an output takes."""
    return 4 * (top_k + columns_of(top_k, draftable))


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.safetensors"


def write_shard(path: Path, outputs: Sequence[TopRows]) -> None:
    """One shard, whole or not at all."""
    columns = {
        "tokens": torch.cat([one.tokens for one in outputs]).to(torch.int32).cpu(),
        "log_probs": torch.cat([one.log_probs for one in outputs]).float().cpu(),
    }
    with renamed_when_whole(path) as temporary:
        save_file(columns, temporary)


@dataclass
class TeacherRows:
    """A finished folder, read an output at a time from memory-mapped files."""

    folder: Path
    manifest: TeacherManifest
    ends: np.ndarray
    """[rows] where each output ends, counted in tokens from the beginning of its shard."""
    lengths: np.ndarray
    """[rows] tokens of each output."""
    _open: dict[int, Any] = field(default_factory=dict, repr=False)

    def read(self, row: int) -> TopRows:
        """The rows along an output; row: index among the distilled rows. Shapes: [T, ...]."""
        shard = row // self.manifest.shard_rows
        if shard not in self._open:
            self._open[shard] = safe_open(shard_path(self.folder, shard), framework="pt")
        end = int(self.ends[row])
        span = slice(end - int(self.lengths[row]), end)
        tokens, log_probs = (
            self._open[shard].get_slice(name)[span] for name in ("tokens", "log_probs")
        )
        return TopRows(tokens.long(), log_probs)

    def share(self) -> float:
        """Mean probability of the k likeliest tokens together, over all positions."""
        k, total = self.manifest.top_k, 0.0
        for shard in range(self.manifest.shards):
            with safe_open(shard_path(self.folder, shard), framework="pt") as file:
                total += float(file.get_tensor("log_probs")[:, :k].double().exp().sum())
        return total / max(1, int(self.lengths.sum()))


def open_teacher(folder: Path, lengths: np.ndarray) -> TeacherRows:
    """A finished folder. lengths [rows]: tokens of each output.

    Raises ConfigError where it is unfinished or damaged.
    """
    manifest = store.read_manifest(TeacherManifest, folder)
    check_finished(folder, manifest)
    return check_shards(folder, manifest, lengths)


def check_shards(folder: Path, manifest: TeacherManifest, lengths: np.ndarray) -> TeacherRows:
    """The shards of a folder, all there. Raises ConfigError for a damaged one."""
    ends = []
    for shard in range(manifest.shards):
        own = lengths[manifest.rows_of(shard)].cumsum()
        ends.append(own)
        path, count = shard_path(folder, shard), int(own[-1])
        wanted = [(count, manifest.top_k), (count, manifest.columns)]
        try:
            with safe_open(path, framework="pt") as file:
                names = ("tokens", "log_probs")
                found = [tuple(file.get_slice(name).get_shape()) for name in names]
        except (SafetensorError, OSError) as error:
            found = error
        if found != wanted:
            raise ConfigError(
                f"{path} cannot be read ({found} where {wanted} belongs); delete it and run the "
                "same command again: the other shards stay"
            )
    return TeacherRows(folder, manifest, np.concatenate(ends), lengths)
