"""Distilled outputs on disk: Parquet shards, and a manifest with their row counts.

ok + skipped + error = rows. The pages of a shard have checksums, so damaged rows are detected.
"""

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
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
SCHEMA = pyarrow.schema(
    [
        ("row", pyarrow.int64()),
        ("source_ids", pyarrow.list_(pyarrow.int32())),
        ("target_ids", pyarrow.list_(pyarrow.int32())),
        ("status", pyarrow.string()),
        ("reason", pyarrow.string()),
    ]
)
AUDIO_SCHEMA = pyarrow.schema(
    [*SCHEMA, ("prefix_ids", pyarrow.list_(pyarrow.int32())), ("seconds", pyarrow.float32())]
)
WHICH_TARGET = frozenset(
    f"settings.target.{name}" for name in ("path", "revision", "device", "trust_remote_code")
)
"""Settings of a target's location and device; the hash of its weights is compared instead."""


@dataclass(frozen=True)
class ShardRow:
    """One input row and its output."""

    row: int
    """Row number in the original file, from 0."""
    source_ids: Sequence[int] = ()
    """Empty for a clip, which is not copied."""
    target_ids: Sequence[int] = ()
    """All tokens after the decoder start token, EOS included, no padding."""
    status: Literal["ok", "skipped", "error"] = "ok"
    reason: str = ""
    """Why it was skipped or failed; for ok, `TRUNCATED` if the output was cut at max_new_tokens."""
    prefix_ids: Sequence[int] = ()
    """For a clip: tokens between the decoder start token and the output."""
    seconds: float | None = None
    """For a clip: its length in seconds."""
    encoded: int = 0
    """For a clip: number of encoder positions. Not stored."""
    source: Source | None = None
    """For a clip: its features while it is decoded. Not stored."""

    @property
    def length(self) -> int:
        """Known number of positions in a batch: encoder positions, or source and output tokens."""
        return self.encoded or len(self.source_ids) + len(self.target_ids)


class Counts(Config):
    """Row counts, ok + skipped + error = rows of the manifest, and token counts."""

    ok: int
    skipped: int
    error: int
    truncated: int
    """Number of ok rows whose output was cut at max_new_tokens."""
    source_tokens: int
    """Source tokens of the ok rows."""
    target_tokens: int
    """Output tokens of the ok rows."""


class Manifest(ShardManifest):
    """Manifest of a distillation: settings, hashes of target and inputs, and counts if finished.

    A resumed run compares weights and texts by content, not by path; references do not matter.
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
    """The backend used; when sampling, a server draws other samples of the same distribution."""
    served_model: str | None = None
    """The server's name for the target."""
    commit: str | None
    """Commit hash of a target from the Hub."""
    weights_sha256: str | None
    """None if a server ran the target."""
    tokenizer_sha256: str
    generation_config: dict[str, Any]
    """The target's generation_config without the values that the settings determine."""
    inputs_sha256: str
    """Hash of row numbers and inputs (`hash_inputs`)."""
    rows: int
    versions: dict[str, str]
    counts: Counts | None = None
    """None until all shards exist."""

    @property
    def shard_rows(self) -> int:
        return self.settings.shard_rows


class DerivedManifest(ShardManifest):
    """Manifest of tensors computed from distilled outputs, which are compared by content."""

    VERB: ClassVar[str] = "cache"
    SUFFIX: ClassVar[str] = "safetensors"
    MAY_DIFFER: ClassVar[frozenset[str]] = frozenset({"target.path", "versions", "counts"})

    target: ModelIdentity
    outputs_sha256: str
    """Hash of row numbers, sources and outputs."""
    rows: int
    versions: dict[str, str]


def derived_from(target: LoadedTarget, outputs: datasets.Dataset) -> dict[str, Any]:
    """Returns the common fields of a `DerivedManifest`, computed from target and outputs."""
    digest = hashlib.sha256()
    for row in outputs:
        digest.update(f"{row['row']}\t{row['source_ids']}\t{row['target_ids']}\n".encode())
    return {
        "target": ModelIdentity.of(target.path, target.model),
        "outputs_sha256": digest.hexdigest(),
        "rows": len(outputs),
        "versions": VERSIONS,
    }


def write_shard(path: Path, rows: Sequence[ShardRow]) -> None:
    """Writes one shard atomically."""
    schema = AUDIO_SCHEMA if any(row.seconds is not None for row in rows) else SCHEMA
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    table = pyarrow.table(columns, schema=schema)
    with renamed_when_whole(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def check_some(folder: Path, manifest: Manifest) -> None:
    """Raises ConfigError if no row of a finished folder has an output."""
    if (counts := manifest.counts).ok == 0:
        raise ConfigError(
            f"{str(folder)!r} holds no output: {counts.skipped} rows were skipped and "
            f"{counts.error} failed; the shards' `reason` column says why: mend that, and distil "
            "into another folder"
        )


def load_distilled(folder: Path | str) -> datasets.Dataset:
    """Loads the ok rows of a finished folder: row, source_ids and target_ids; for clips also
    prefix_ids and seconds. Raises ConfigError for an unfinished, damaged or empty folder."""
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
    """Reads all shards. Raises ConfigError if one is damaged or has a wrong number of rows."""
    tables = []
    for shard in range(manifest.shards):
        path, rows = manifest.path(folder, shard), len(manifest.rows_of(shard))
        try:
            table = pyarrow.parquet.read_table(path, page_checksum_verification=True)
            schema = AUDIO_SCHEMA if "prefix_ids" in table.column_names else SCHEMA
            tables.append(table.select(schema.names).cast(schema))
        except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{path} cannot be read ({reason}); {REMEDY}") from None
        if len(table) != rows:
            raise ConfigError(f"{path} has {len(table)} rows where {rows} belong; {REMEDY}")
    return pyarrow.concat_tables(tables)


def count_rows(table: pyarrow.Table) -> Counts:
    """Counts the rows of a table by status, and the tokens of the ok rows."""
    statuses = table["status"].to_pylist()
    ok = table.filter(compute.equal(table["status"], "ok"))
    return Counts(
        **{status: statuses.count(status) for status in ("ok", "skipped", "error")},
        truncated=ok["reason"].to_pylist().count(TRUNCATED),
        source_tokens=len(ok["source_ids"].combine_chunks().flatten()),
        target_tokens=len(ok["target_ids"].combine_chunks().flatten()),
    )


def input_keys(inputs: datasets.Dataset) -> list[str]:
    """Returns what identifies each row of `load_inputs`: its text; for chats the arguments of the
    chat template, for clips the hash of the file."""
    if DIGESTS in inputs.column_names:
        return inputs[DIGESTS][:]
    if CHAT in inputs.column_names:
        return [chat or "" for chat in inputs[CHAT][:]]
    return inputs["source"][:]


def hash_inputs(inputs: datasets.Dataset) -> str:
    """Returns the SHA-256 of the row numbers and `input_keys`, in order."""
    digest = hashlib.sha256()
    for row, text in zip(inputs["row"][:], input_keys(inputs), strict=True):
        digest.update(f"{row}\t{len(text)}\t{text}\n".encode())
    return digest.hexdigest()
