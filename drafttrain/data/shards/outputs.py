"""Distilled outputs on disk: Parquet shards and the manifest that accounts for them.

A folder holds shard-00000.parquet, shard-00001.parquet, ... and manifest.json. A file is written to
a temporary name and renamed, so whatever bears its final name is whole; merging is nothing but
listing. The manifest is written first, with `counts` empty, and completed when every shard lies
there: ok + skipped + error = rows. A shard carries a digest of its rows: what is read back is what
was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow
import pyarrow.compute as compute
import pyarrow.parquet
from pydantic import ValidationError

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.config.reading import first_problem
from drafttrain.data.inputs.rows import CHATS
from drafttrain.data.shards.writing import renamed_when_whole
from drafttrain.models.identity import hash_tokenizer as hash_tokenizer
from drafttrain.models.identity import hash_weights as hash_weights

MANIFEST = "manifest.json"
DIGEST = b"sha256"
"""Key of the rows' digest among a shard's metadata; shards of earlier versions have none."""
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


@dataclass(frozen=True)
class ShardRow:
    """One input row and what became of it."""

    row: int
    """Number in the original file, from 0."""
    source_ids: Sequence[int] = ()
    target_ids: Sequence[int] = ()
    """All tokens after the decoder start token, EOS included, no padding."""
    status: Literal["ok", "skipped", "error"] = "ok"
    reason: str = ""
    """Why it was skipped or failed; for ok, whether the output was cut at max_new_tokens."""


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


class Manifest(Config):
    """What was distilled from what, how, and whether it is finished."""

    target: str
    """Path or Hub name as it was given."""
    revision: str | None
    commit: str | None
    """Commit hash on the Hub, where the target came from there."""
    weights_sha256: str
    dtype: str
    tokenizer_sha256: str
    generation_config: dict[str, Any]
    """The target's own, without what the settings below state."""
    method: str
    num_beams: int
    max_new_tokens: int
    temperature: float | None
    """This and the next three: None where method is not sample."""
    top_k: int | None
    top_p: float | None
    seed: int | None
    batch_tokens: int
    shard_rows: int
    max_source_tokens: int
    data: dict[str, Any]
    """The settings of the inputs."""
    inputs_sha256: str
    """Of the row numbers and texts."""
    rows: int
    versions: dict[str, str]
    counts: Counts | None = None
    """None until every shard is there."""

    @property
    def shards(self) -> int:
        return -(-self.rows // self.shard_rows)

    def rows_in(self, shard: int) -> int:
        """Input rows of a shard; the last one may have fewer."""
        return min(self.shard_rows, self.rows - shard * self.shard_rows)


MAY_DIFFER = {"target", "revision", "commit", "versions", "counts"}
"""Fields that a resumed run need not share: the weights are compared by content, not by path."""
DATA_MAY_DIFFER = {"path", "reference_path", "reference_column", "target_language"}
"""The same for the inputs: references are not distilled."""


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.parquet"


def missing_shards(folder: Path, manifest: Manifest) -> list[int]:
    """Shards still to be written."""
    return [i for i in range(manifest.shards) if not shard_path(folder, i).is_file()]


def write_shard(path: Path, rows: Sequence[ShardRow]) -> None:
    """One shard, whole or not at all."""
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    table = pyarrow.table(columns, schema=SCHEMA)
    table = table.replace_schema_metadata({DIGEST: hash_rows(table)})
    with renamed_when_whole(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    with renamed_when_whole(folder / MANIFEST) as temporary:
        temporary.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of a distilled folder, finished or not. Raises ConfigError."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ConfigError(
            f"{str(folder)!r} holds no {MANIFEST}; make it with `drafttrain distill --out {folder}`"
        )
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error.reason
        raise ConfigError(
            f"{path} is not a manifest of this version ({reason}); "
            "distil into another folder, or delete this one"
        ) from None


def check_same_settings(folder: Path, there: Manifest, wanted: Manifest) -> None:
    """A folder is resumed only with the settings it was begun with. Raises ConfigError."""
    for field, old, new in _differences(there, wanted):
        where = ""
        if field == "inputs_sha256":
            where = f" (the texts of {wanted.data['path']!r} are not those of the first run)"
        if field == "weights_sha256":
            where = f" (the first run's target was {there.target!r}, this is {wanted.target!r})"
        raise ConfigError(
            f"{folder / MANIFEST} was begun with {field} = {old!r}, but the settings now say "
            f"{new!r}{where}; go back to the old value, or give another folder with out="
        )


def _differences(there: Manifest, wanted: Manifest) -> Iterator[tuple[str, Any, Any]]:
    old, new = there.model_dump(mode="json"), wanted.model_dump(mode="json")
    defaults = DataConfig(path="").model_dump(mode="json")
    old["data"] = defaults | old["data"]  # begun before a setting of the inputs existed
    last = [name for name in ("inputs_sha256", "rows") if name in old]  # causes before effects
    for field in [name for name in old if name not in last] + last:
        if field in MAY_DIFFER or old[field] == new[field]:
            continue
        if not isinstance(old[field], dict):
            yield field, old[field], new[field]
            continue
        for key in sorted(old[field].keys() | new[field].keys()):
            before, after = old[field].get(key), new[field].get(key)
            if before != after and not (field == "data" and key in DATA_MAY_DIFFER):
                yield f"{field}.{key}", before, after


def count_rows(folder: Path, manifest: Manifest) -> Counts:
    """The account of all shards. Raises ConfigError if one is damaged or has other rows."""
    return _count(_read_shards(folder, manifest))


def lost_rows(folder: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Number, status and reason of the rows that gave no output."""
    table = _read_shards(folder, manifest).select(["row", "status", "reason"])
    return table.filter(compute.not_equal(table["status"], "ok")).to_pylist()


def load_distilled(folder: Path | str) -> datasets.Dataset:
    """The ok rows of a finished folder: row, source_ids and target_ids. Raises ConfigError."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    missing = missing_shards(folder, manifest)
    if missing or manifest.counts is None:
        raise ConfigError(
            f"{str(folder)!r} is unfinished: {manifest.shards - len(missing)} of "
            f"{manifest.shards} shards are there; run the same `drafttrain distill` again, "
            "it continues"
        )
    table = _read_shards(folder, manifest)
    found = _count(table)
    if found != manifest.counts:
        raise ConfigError(
            f"the shards in {str(folder)!r} hold {found}, but its {MANIFEST} says "
            f"{manifest.counts}; distil into another folder"
        )
    if found.ok == 0:
        raise ConfigError(
            f"{str(folder)!r} holds no output: {found.skipped} rows were skipped and "
            f"{found.error} failed; the shards' `reason` column says why"
        )
    return datasets.Dataset(_ok_rows(table).select(["row", "source_ids", "target_ids"]))


def _read_shards(folder: Path, manifest: Manifest) -> pyarrow.Table:
    return pyarrow.concat_tables(
        _read_shard(shard_path(folder, shard), manifest.rows_in(shard))
        for shard in range(manifest.shards)
    )


def _read_shard(path: Path, rows: int) -> pyarrow.Table:
    """The rows of a shard, as they were written. Raises ConfigError."""
    remedy = "delete it and distil again: the other shards stay"
    try:
        table = pyarrow.parquet.read_table(path)
        digest = (table.schema.metadata or {}).get(DIGEST)
        table = table.select(SCHEMA.names).cast(SCHEMA)
        damaged = digest is not None and digest != hash_rows(table).encode()
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); {remedy}") from None
    if damaged:
        raise ConfigError(f"{path} is damaged: its rows are not those written; {remedy}")
    if len(table) != rows:
        raise ConfigError(f"{path} has {len(table)} rows where {rows} belong; {remedy}")
    return table


def hash_rows(table: pyarrow.Table) -> str:
    """SHA-256 of all values, whatever the encoding on disk."""
    digest = hashlib.sha256()
    for name in SCHEMA.names:
        column = table[name].combine_chunks()
        parts = [column]
        if pyarrow.types.is_list(column.type):
            parts = [compute.list_value_length(column), compute.list_flatten(column)]
        for part in parts:
            text = pyarrow.types.is_string(part.type)
            values = json.dumps(part.to_pylist()).encode() if text else part.to_numpy().tobytes()
            digest.update(f"{name}\t{len(part)}\t".encode() + values)
    return digest.hexdigest()


def _ok_rows(table: pyarrow.Table) -> pyarrow.Table:
    return table.filter(compute.equal(table["status"], "ok"))


def _count(table: pyarrow.Table) -> Counts:
    statuses = table["status"].to_pylist()
    ok = _ok_rows(table)
    tokens = {
        side: compute.sum(compute.list_value_length(ok[f"{side}_ids"])).as_py() or 0
        for side in ("source", "target")
    }
    return Counts(
        ok=statuses.count("ok"),
        skipped=statuses.count("skipped"),
        error=statuses.count("error"),
        truncated=ok["reason"].to_pylist().count(TRUNCATED),
        source_tokens=tokens["source"],
        target_tokens=tokens["target"],
    )


def hash_inputs(inputs: datasets.Dataset) -> str:
    """SHA-256 of the row numbers and texts (of chats, all turns), in order."""
    digest = hashlib.sha256()
    for batch in inputs.iter(batch_size=4096):
        texts = batch["source"]
        if CHATS in batch:
            texts = [json.dumps(chat, sort_keys=True) for chat in batch[CHATS]]
        for row, text in zip(batch["row"], texts, strict=True):
            digest.update(f"{row}\t{len(text)}\t{text}\n".encode())
    return digest.hexdigest()
