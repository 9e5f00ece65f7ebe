"""Distilled outputs on disk: Parquet shards and the manifest that accounts for them.

ok + skipped + error = rows. Pages of a shard carry checksums, so damaged rows are found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import datasets
import pyarrow
import pyarrow.compute as compute
import pyarrow.parquet
import torch
import transformers

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.data.inputs.chats import CHAT
from drafttrain.data.inputs.clips import DIGESTS
from drafttrain.data.shards.store import MANIFEST, REMEDY, ShardManifest
from drafttrain.data.shards.writing import renamed_when_whole
from drafttrain.decoding.types import Source
from drafttrain.models.identity import ModelIdentity
from drafttrain.models.loading import LoadedTarget

TRUNCATED = "no end within max_new_tokens"
SCHEMA = pyarrow.schema(
    [
        ("row", pyarrow.int64()),
        ("source_ids", pyarrow.list_(pyarrow.int32())),
        ("target_ids", pyarrow.list_(pyarrow.int32())),
        ("status", pyarrow.string()),
        ("reason", pyarrow.string()),
    ]
)
HEARD_SCHEMA = pyarrow.schema(
    [*SCHEMA, ("prefix_ids", pyarrow.list_(pyarrow.int32())), ("seconds", pyarrow.float32())]
)
"""Of shards whose inputs are clips."""


WHICH_TARGET = frozenset(
    f"settings.target.{name}" for name in ("path", "revision", "device", "trust_remote_code")
)
"""Settings that say where a target lies and runs, which its weights are compared for."""


@dataclass(frozen=True)
class ShardRow:
    """One input row and its output."""

    row: int
    """Number in the original file, from 0."""
    source_ids: Sequence[int] = ()
    """None of a clip, which is not copied."""
    target_ids: Sequence[int] = ()
    """All tokens after the decoder start token, EOS included, no padding."""
    status: Literal["ok", "skipped", "error"] = "ok"
    reason: str = ""
    """Why it was skipped or failed; for ok, whether the output was cut at max_new_tokens."""
    prefix_ids: Sequence[int] = ()
    """Of a clip: what stands between the decoder start token and the output."""
    seconds: float | None = None
    """Of a clip: its length."""
    encoded: int = 0
    """Of a clip: positions that the encoder gives it. Not stored."""
    source: Source | None = None
    """Of a clip: its features, while it is decoded. Not stored."""

    @property
    def length(self) -> int:
        """Positions that it takes in a batch, as far as it is known."""
        return self.encoded or len(self.source_ids) + len(self.target_ids)


class Counts(Config):
    """The account: ok + skipped + error = rows of the manifest."""

    ok: int
    skipped: int
    error: int
    truncated: int
    """Rows among ok whose output was cut at max_new_tokens."""
    source_tokens: int
    """Tokens of the ok rows' sources."""
    target_tokens: int
    """Tokens of the ok rows' outputs."""


class Manifest(ShardManifest):
    """What was distilled from what, how, and whether it is finished.

    Weights and texts are compared by content, not by path, and references are not distilled.
    """

    COMMAND: ClassVar[str] = "drafttrain distill"
    VERB: ClassVar[str] = "distil"
    SUFFIX: ClassVar[str] = "parquet"
    MAY_DIFFER: ClassVar[frozenset[str]] = frozenset(
        {"commit", "versions", "counts"}
        | {f"settings.{name}" for name in ("out", "backend", "batch_tokens", "batch_rows")}
        | {f"settings.server.{name}" for name in ("url", "model", "concurrency")}
        | {f"settings.data.{name}" for name in ("path", "reference_path", "reference_column")}
        | WHICH_TARGET
    )

    settings: DistillConfig
    backend: str
    """What decoded: sampled rows are different samples from the same distribution by another."""
    served_model: str | None = None
    """The name that a server has for the target."""
    commit: str | None
    """Commit hash on the Hub, where the target came from there."""
    weights_sha256: str | None
    """None where a server ran the target."""
    tokenizer_sha256: str
    generation_config: dict[str, Any]
    """The target's own, without what the settings state."""
    inputs_sha256: str
    """Of the row numbers and texts."""
    rows: int
    versions: dict[str, str]
    counts: Counts | None = None
    """None until every shard is there."""

    @property
    def shard_rows(self) -> int:
        return self.settings.shard_rows


class DerivedManifest(ShardManifest):
    """Manifest of tensors computed from distilled outputs; these and models are compared by
    content, not by path."""

    VERB: ClassVar[str] = "cache"
    SUFFIX: ClassVar[str] = "safetensors"
    MAY_DIFFER: ClassVar[frozenset[str]] = frozenset({"target.path", "versions", "counts"})

    target: ModelIdentity
    outputs_sha256: str
    """Of the row numbers, sources and outputs."""
    rows: int
    """Distilled rows."""
    versions: dict[str, str]


def used_versions() -> dict[str, str]:
    """Of the libraries that computed what a folder holds."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def derived_from(target: LoadedTarget, outputs: datasets.Dataset) -> dict[str, Any]:
    """Fields of a `DerivedManifest`."""
    digest = hashlib.sha256()
    for row in outputs:
        digest.update(f"{row['row']}\t{row['source_ids']}\t{row['target_ids']}\n".encode())
    return {
        "target": ModelIdentity.of(target.path, target.model),
        "outputs_sha256": digest.hexdigest(),
        "rows": len(outputs),
        "versions": used_versions(),
    }


def write_shard(path: Path, rows: Sequence[ShardRow]) -> None:
    """One shard, whole or not at all."""
    schema = HEARD_SCHEMA if any(row.seconds is not None for row in rows) else SCHEMA
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    table = pyarrow.table(columns, schema=schema)
    with renamed_when_whole(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def check_some(folder: Path, manifest: Manifest) -> None:
    """Raises ConfigError for a finished folder in which no row has an output."""
    counts = manifest.counts
    if counts.ok == 0:
        raise ConfigError(
            f"{str(folder)!r} holds no output: {counts.skipped} rows were skipped and "
            f"{counts.error} failed; the shards' `reason` column says why: mend that, and distil "
            "into another folder"
        )


def load_distilled(folder: Path | str) -> datasets.Dataset:
    """The ok rows of a finished folder: row, source_ids and target_ids; of clips prefix_ids and
    seconds too. Raises ConfigError."""
    folder = Path(folder)
    manifest = Manifest.read_finished(folder)
    table = read_shards(folder, manifest)
    found = count_rows(table)
    if found != manifest.counts:
        raise ConfigError(
            f"the shards in {str(folder)!r} hold {found}, but its {MANIFEST} says "
            f"{manifest.counts}; distil into another folder"
        )
    check_some(folder, manifest)
    ok = table.filter(compute.equal(table["status"], "ok"))
    return datasets.Dataset(ok.drop_columns(["status", "reason"]))


def read_shards(folder: Path, manifest: Manifest) -> pyarrow.Table:
    """The rows of all shards. Raises ConfigError if one is damaged or has other rows."""
    tables = []
    for shard in range(manifest.shards):
        path, rows = manifest.path(folder, shard), len(manifest.rows_of(shard))
        try:
            table = pyarrow.parquet.read_table(path, page_checksum_verification=True)
            schema = HEARD_SCHEMA if "prefix_ids" in table.column_names else SCHEMA
            tables.append(table.select(schema.names).cast(schema))
        except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{path} cannot be read ({reason}); {REMEDY}") from None
        if len(table) != rows:
            raise ConfigError(f"{path} has {len(table)} rows where {rows} belong; {REMEDY}")
    return pyarrow.concat_tables(tables)


def count_rows(table: pyarrow.Table) -> Counts:
    """The account of some rows."""
    statuses = table["status"].to_pylist()
    ok = table.filter(compute.equal(table["status"], "ok"))
    source_tokens, target_tokens = (
        compute.sum(compute.list_value_length(ok[name])).as_py() or 0
        for name in ("source_ids", "target_ids")
    )
    return Counts(
        ok=statuses.count("ok"),
        skipped=statuses.count("skipped"),
        error=statuses.count("error"),
        truncated=ok["reason"].to_pylist().count(TRUNCATED),
        source_tokens=source_tokens,
        target_tokens=target_tokens,
    )


def input_keys(inputs: datasets.Dataset) -> list[str]:
    """What tells the rows of `load_inputs` apart: their texts; of chats all that their template
    gets, of clips the hashes of their files."""
    if DIGESTS in inputs.column_names:
        return inputs[DIGESTS][:]
    if CHAT in inputs.column_names:
        return [chat or "" for chat in inputs[CHAT][:]]
    return inputs["source"][:]


def hash_inputs(inputs: datasets.Dataset) -> str:
    """SHA-256 of the row numbers and `input_keys`, in order."""
    digest = hashlib.sha256()
    for row, text in zip(inputs["row"][:], input_keys(inputs), strict=True):
        digest.update(f"{row}\t{len(text)}\t{text}\n".encode())
    return digest.hexdigest()
