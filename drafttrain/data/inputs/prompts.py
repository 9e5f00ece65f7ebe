"""Inputs: any of the places people keep texts or chats in -> rows of (row, source, reference).

Read with `datasets`: a Hub name, a local file (json, jsonl, parquet, csv, tsv, txt, each also .gz),
two line-aligned files, a folder written by `save_to_disk`, or a folder of data files. For targets
that hear: recordings, a folder of them, or rows that name or hold them.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.clips import SUFFIXES, as_clips, check_clip_settings, find_files
from drafttrain.data.inputs.rows import as_inputs, select_rows

BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    # without keep_default_na=False the texts "None", "NA" and "null" would be read as missing
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
    ".txt": ("text", {}),
}
LOADING_ERRORS = (OSError, EOFError, RuntimeError, StopIteration, ValueError, zlib.error)
LOADING_ERRORS += (datasets.exceptions.DatasetsError,)
HEAD_BYTES = 1 << 16
DATA_FIELD = re.compile(rf"\bdata\.(?=({'|'.join(DataConfig.model_fields)})\b)")
"""`data.` before a setting's name; messages are worded for the group that is called so."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_inputs(config: DataConfig, group: str = "data", heard: bool = False) -> datasets.Dataset:
    """The inputs as rows of `row`, `source` and `reference` (None where there is none).

    heard: they are recordings, with more columns (`clips.as_clips`). Of texts:
    `row` counts the records of the original file from 0; `where`, `skip` and `limit` do not
    renumber. `source` has prefix and suffix applied; a
    missing text is these alone, and later skipped by its number. Chats have a column `messages`
    too, and `source` is the user's last turn: `tokens.tokenize_prompts` renders them. Raises
    ConfigError naming the field, the value and the remedy; `group` is how the user calls these
    settings (held_out, report_data).
    """
    path = Path(config.path)
    try:
        with _quiet(path.exists()):
            if heard:
                check_clip_settings(config)
            rows = _load_rows(config, path, heard)
            if len(rows) == 0:
                raise ConfigError(
                    f"data.path = {config.path!r} holds no rows; give a file with inputs"
                )
            if heard:
                return as_clips(rows, config)
            return as_inputs(rows, select_rows(rows, config), config)
    except ConfigError as error:
        raise ConfigError(DATA_FIELD.sub(f"{group}.", str(error))) from None


def _load_rows(config: DataConfig, path: Path, heard: bool) -> datasets.Dataset:
    if config.reference_path is not None:
        return _load_aligned(config)
    if heard and path.exists() and not _is_saved(path) and (files := find_files(path)) is not None:
        return files
    if _is_saved(path):
        return _load_saved(config)
    if path.is_file():
        for field in ("config_name", "split"):
            if getattr(config, field) != DataConfig.model_fields[field].default:
                raise ConfigError(
                    f"data.{field} = {getattr(config, field)!r} is for Hub data sets and folders, "
                    f"but {config.path!r} is a file; leave it out"
                )
        return _load_file(path, "data.path")
    of_kind = _kind_suffix(path) in (*BUILDERS, *SUFFIXES)
    if not path.is_dir() and (of_kind or not HUB_NAME.fullmatch(config.path)):
        raise ConfigError(
            f"data.path = {config.path!r}: no such file or folder; give an existing one, or the "
            "name of a data set on the Hub"
        )
    try:
        return datasets.load_dataset(config.path, config.config_name, split=config.split)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"data.path = {config.path!r} (data.config_name = {config.config_name!r}, data.split "
            f"= {config.split!r}) cannot be loaded: {_innermost(error)}; give a file, a folder "
            "with files of one kind, or the name of a data set on the Hub"
        ) from None


def _load_aligned(config: DataConfig) -> datasets.Dataset:
    for field in ("input_column", "reference_column", "source_language", "target_language"):
        if (value := getattr(config, field)) is not None:
            raise ConfigError(
                f"data.{field} = {value!r} has no meaning with data.reference_path: two "
                "line-aligned text files have no columns; leave one of them out"
            )
    sides = {}
    for field, text_path in (("path", config.path), ("reference_path", config.reference_path)):
        path, name = Path(text_path), f"data.{field}"
        if not path.is_file():
            raise ConfigError(f"{name} = {text_path!r}: no such file; give an existing one")
        if BUILDERS.get(_kind_suffix(path), ("text",))[0] != "text":
            raise ConfigError(
                f"{name} = {text_path!r} is no plain text; data.reference_path is for two "
                "line-aligned text files (name the columns of one file with data.input_column "
                "and data.reference_column instead)"
            )
        sides[field] = _load_file(path, name)
    counts = {field: len(rows) for field, rows in sides.items()}
    if counts["path"] != counts["reference_path"]:
        raise ConfigError(
            f"data.path {config.path!r} has {counts['path']} lines but data.reference_path "
            f"{config.reference_path!r} has {counts['reference_path']}; they must be line-aligned"
        )
    source = sides["path"].rename_column("text", "source")
    reference = sides["reference_path"].rename_column("text", "reference")
    return datasets.concatenate_datasets([source, reference], axis=1)


def _load_file(path: Path, name: str) -> datasets.Dataset:
    """One local file; a suffix that says nothing (train.en) is read as lines of text."""
    suffix = _kind_suffix(path)
    builder, options = BUILDERS.get(suffix, ("text", {}))
    try:
        if suffix not in BUILDERS and not _is_text(path):
            raise ConfigError(
                f"{name} = {str(path)!r} is neither text nor of a known kind; give one of "
                f"{', '.join(BUILDERS)}, each also .gz"
            )
        if builder == "parquet" and path.suffix == ".gz":  # a builder needs to seek in the file
            packed = pyarrow.BufferReader(gzip.decompress(path.read_bytes()))
            return datasets.Dataset(pyarrow.parquet.read_table(packed))
        return datasets.load_dataset(builder, data_files=str(path), split="train", **options)
    except ConfigError:
        raise
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"{name} = {str(path)!r} cannot be read as {builder}: {_innermost(error)}; mend the "
            "file, or give another"
        ) from None


def _load_saved(config: DataConfig) -> datasets.Dataset:
    saved = datasets.load_from_disk(config.path)
    if isinstance(saved, datasets.Dataset):
        return saved
    if config.split not in saved:
        raise ConfigError(
            f"data.split = {config.split!r} is not in {config.path!r}; there are: "
            f"{', '.join(saved)}"
        )
    return saved[config.split]


def _is_saved(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def _kind_suffix(path: Path) -> str:
    """The suffix that tells the kind, .gz set aside."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _is_text(path: Path) -> bool:
    """Whether the first bytes, unpacked, are UTF-8 without a zero."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # may end inside a character
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{error}" or type(error).__name__


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Local files load in moments and their errors are told by us; only downloads deserve bars."""
    bars, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    if quiet:
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
