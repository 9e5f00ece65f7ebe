"""A folder of shards and the manifest that accounts for them, for whatever the shards hold.

A file is written to a temporary name and renamed, so whatever bears its final name is whole;
merging is nothing but listing. The manifest is written first, with `counts` empty, and completed
when every shard lies there. A folder goes on only under the settings that it was begun with.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.reading import first_problem
from drafttrain.data.shards.sharing import Share
from drafttrain.data.shards.writing import renamed_when_whole

MANIFEST = "manifest.json"


class ShardManifest(Config):
    """What was made of what, how, and whether it is finished.

    Each kind declares its fields in the order of its file; all have `rows` (of the input),
    `shard_rows` (of them a shard) and `counts` (None until every shard is there).
    """

    COMMAND: ClassVar[str]
    """What makes such a folder, as `drafttrain distill`."""
    VERB: ClassVar[str]
    """The same in a sentence: distil, cache."""
    SHARDS: ClassVar[str]
    """Pattern of what lies in the folder beside the manifest."""
    SETTING: ClassVar[str] = "out"
    """The setting that names the folder."""
    MAY_DIFFER: ClassVar[frozenset[str]]
    """Fields, or dotted fields of a group, that a resumed run need not share."""
    EFFECTS: ClassVar[tuple[str, ...]]
    """Fields that follow from others: they are named last, as a difference has its cause there."""

    @abstractmethod
    def shard_files(self, folder: Path, shard: int) -> list[Path]:
        """All files of one shard."""

    def explain(self, field: str, wanted: ShardManifest) -> str:
        """What a difference in this field means to a user, where its name does not tell."""
        return ""

    @property
    def shards(self) -> int:
        return count_shards(self.rows, self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """Numbers of a shard's rows, counted from 0; the last shard may have fewer."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.rows))

    def settled(self) -> dict[str, Any]:
        """What a resumed run must share, by dotted fields."""
        flat: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            grouped = isinstance(value, dict) and name not in self.MAY_DIFFER
            flat |= {f"{name}.{key}": v for key, v in value.items()} if grouped else {name: value}
        return {name: value for name, value in flat.items() if name not in self.MAY_DIFFER}


M = TypeVar("M", bound=ShardManifest)


def count_shards(rows: int, shard_rows: int) -> int:
    return -(-rows // shard_rows)


def count_there(shards: Iterable[Sequence[Path]]) -> int:
    """Shards of which every file is there."""
    return sum(all(file.is_file() for file in files) for files in shards)


def check_folder(folder: Path) -> None:
    """Shards need a folder. Raises ConfigError."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out = {str(folder)!r} is a file; give a folder")


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    with renamed_when_whole(folder / MANIFEST) as temporary:
        temporary.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_manifest(kind: type[M], folder: Path | str) -> M:
    """The manifest of a folder, finished or not. Raises ConfigError."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ConfigError(
            f"{str(folder)!r} holds no {MANIFEST}; make it with `{kind.COMMAND} --out {folder}`"
        )
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error.reason
        raise ConfigError(
            f"{path} is not a manifest of this version ({reason}); {kind.VERB} into another "
            "folder, or delete this one"
        ) from None


def missing_shards(folder: Path, manifest: ShardManifest) -> list[int]:
    """Shards still to be written, in whole or in part."""
    return [
        shard
        for shard in range(manifest.shards)
        if not all(file.is_file() for file in manifest.shard_files(folder, shard))
    ]


def check_finished(folder: Path, manifest: ShardManifest) -> None:
    """Every shard is there and has been counted. Raises ConfigError."""
    missing = missing_shards(folder, manifest)
    if missing or manifest.counts is None:
        raise ConfigError(
            f"{str(folder)!r} is unfinished: {manifest.shards - len(missing)} of "
            f"{manifest.shards} shards are there; run the same `{manifest.COMMAND}` again, "
            "it continues"
        )


def is_finished(kind: type[M], folder: Path) -> bool:
    """Whether every shard is there and has been counted."""
    if not (folder / MANIFEST).is_file():
        return False
    manifest = read_manifest(kind, folder)
    return manifest.counts is not None and not missing_shards(folder, manifest)


def begin_folder(folder: Path, wanted: ShardManifest, share: Share) -> None:
    """Compares with what an earlier run has begun here, or begins. Raises ConfigError.

    Half-written files that a killed launch of this share left are deleted.
    """
    # listed first: another share may write the manifest and then a shard at this moment
    strangers = sorted(path.name for path in folder.glob(wanted.SHARDS))
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(type(wanted), folder)
        check_same_settings(folder, manifest, wanted)
        missing = share.of(missing_shards(folder, manifest))
        files = [file for shard in missing for file in manifest.shard_files(folder, shard)]
        share.remove_leftovers(folder, files)
        return
    if strangers:
        raise ConfigError(
            f"{str(folder)!r} holds {strangers[0]} but no {MANIFEST}; give another folder with "
            f"{wanted.SETTING}="
        )
    write_manifest(folder, wanted)


def check_same_settings(folder: Path, there: M, wanted: M) -> None:
    """A folder is resumed only with the settings it was begun with. Raises ConfigError."""
    old, new = there.settled(), wanted.settled()
    for field in sorted(old | new, key=lambda field: field in there.EFFECTS):
        before, now = old.get(field), new.get(field)
        if before != now:
            meaning = there.explain(field, wanted)
            raise ConfigError(
                f"{folder / MANIFEST} was begun with {field} = {before!r}, but the settings now "
                f"say {now!r}{meaning and f' ({meaning})'}; go back to the old value, or give "
                f"another folder with {there.SETTING}="
            )
