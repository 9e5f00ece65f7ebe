"""Loading of inputs (texts, chats or audio clips) as rows of (row, source, reference).

Read with `datasets`: a Hub name, a local file (json, jsonl, parquet, csv, tsv, txt; all but parquet
also .gz), two line-aligned files, a folder written by `save_to_disk`, or a folder of data files.
For targets that take audio: a clip, a folder of clips, or rows that name or contain clips.
"""

import csv
import glob
import gzip
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.data.inputs.chats import CHAT
from drafttrain.data.inputs.clips import SUFFIXES, as_clips, find_files
from drafttrain.data.inputs.rows import LINE, REASON, as_inputs
from drafttrain.data.inputs.tokens import check_chats
from drafttrain.models.loading import check_target, load_tokenizer
from drafttrain.models.speech import takes_audio

TEXT_KINDS = (".json", ".jsonl", ".csv", ".tsv", ".txt")
"""Suffixes of text files with rows; .gz may follow."""
KINDS = (*TEXT_KINDS, ".parquet")
LOADING_ERRORS = (OSError, EOFError, RuntimeError, StopIteration, ValueError)
LOADING_ERRORS += (zlib.error, csv.Error, datasets.exceptions.DatasetsError)
DATA_FIELD = re.compile(rf"\bdata\.(?=({'|'.join(DataConfig.model_fields)})\b)")
"""Matches `data.` before a setting's name; messages replace it by the actual settings group."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_prompts(
    config: DataConfig,
    target: TargetConfig,
    group: str = "data",
    texts: Sequence[str] | None = None,
) -> datasets.Dataset:
    """Loads the inputs of a target: clips if it takes audio, else texts or chats. Reads no weights.
    texts: inputs to use instead of those at config.path. Raises ConfigError as `load_inputs`,
    `check_target` and `check_chats` do, and for texts if the target takes audio."""
    settings = check_target(target)
    if texts is not None and takes_audio(settings):
        raise ConfigError(
            f"target.path = {target.path!r} takes audio, but the inputs are texts; give a "
            "recording, a folder of them, or a jsonl that names them, with --data"
        )
    rows = load_inputs(config, group, takes_audio(settings), texts)
    if CHAT in rows.column_names:
        check_chats(load_tokenizer(target), rows, not settings.is_encoder_decoder)
    return rows


def load_inputs(
    config: DataConfig,
    group: str = "data",
    audio: bool = False,
    texts: Sequence[str] | None = None,
) -> datasets.Dataset:
    """Loads inputs as rows of `row`, `source`, `reference` (None if there is none) and `reason`.

    audio: the inputs are clips, with more columns (`clips.as_clips`). texts: as in `load_prompts`.
    `row` is the record's number in the original file, from 0, unchanged by `skip` and `limit`.
    `source` includes prefix and suffix. An unusable row has an empty source, and `reason` states
    why. Chats also have a column `chat`, and `source` is the last user turn;
    `tokens.tokenize_prompts` renders them. Raises ConfigError with field, value and remedy, also if
    no row is usable; `group` is the user's name of these settings (held_out, report_data).
    """
    path = Path(config.path)
    try:
        if texts is None:
            rows = _load_rows(config, path, audio)
        else:
            rows = datasets.Dataset.from_dict({"text": list(texts)})
        if len(rows) == 0:
            raise ConfigError(f"data.path = {config.path!r} holds no rows; give a file with inputs")
        if config.skip >= len(rows):
            raise ConfigError(
                f"data.skip = {config.skip} leaves nothing: {config.path!r} has {len(rows)} rows; "
                "skip fewer"
            )
        stop = None if config.limit is None else config.skip + config.limit
        numbers = range(len(rows))[config.skip : stop]
        found = (as_clips if audio else as_inputs)(rows, numbers, config)
        if None not in (reasons := found[REASON][:]):
            raise ConfigError(
                f"none of the {len(found)} rows of {config.path!r} ({found.info.description}) can "
                f"be used; row {found[0]['row']}: {reasons[0]}; give data with at least one, or "
                "another column"
            )
        return found
    except ConfigError as error:
        raise ConfigError(DATA_FIELD.sub(f"{group}.", str(error))) from None


def _load_rows(config: DataConfig, path: Path, audio: bool) -> datasets.Dataset:
    if config.reference_path is not None and not audio:
        return _load_aligned(config)
    saved_files = ("dataset_dict.json", "dataset_info.json")  # `save_to_disk` writes one or both
    is_saved = any((path / name).is_file() for name in saved_files)
    if config.config_name is not None and (is_saved or path.is_file()):
        raise ConfigError(
            f"data.config_name = {config.config_name!r} has no effect, because "
            f"{config.path!r} has no configurations; remove it"
        )
    if is_saved:
        saved = datasets.load_from_disk(config.path)
        if isinstance(saved, datasets.DatasetDict) and config.split not in saved:
            raise ConfigError(
                f"data.split = {config.split!r} is not in {config.path!r}; there are: "
                f"{', '.join(saved)}"
            )
        return saved[config.split] if isinstance(saved, datasets.DatasetDict) else saved
    if audio and path.exists() and (files := find_files(path)) is not None:
        return files
    if path.is_file():
        return _load_file(config.path, "data.path", config.split)
    of_kind = _kind_suffix(path) in (*KINDS, *SUFFIXES)
    if not path.is_dir() and (of_kind or not HUB_NAME.fullmatch(config.path)):
        raise ConfigError(
            f"data.path = {config.path!r}: no such file or folder; give an existing one, or the "
            "name of a data set on the Hub"
        )
    try:
        if path.is_dir() and (files := _text_files(config)):
            return datasets.concatenate_datasets([_load_file(one, "data.path") for one in files])
        return datasets.load_dataset(config.path, config.config_name, split=config.split)
    except ConfigError:
        raise
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"data.path = {config.path!r} (data.config_name = {config.config_name!r}, data.split "
            f"= {config.split!r}) cannot be loaded: {_innermost(error)}; give a file, a folder "
            "with files of one kind, or the name of a data set on the Hub"
        ) from None


def _text_files(config: DataConfig) -> list[str]:
    """Returns the files of a folder's split, found by `datasets`, if all are text files, whose rows
    are read one by one; else an empty list. Raises ValueError if its name would be a pattern."""
    if glob.escape(config.path) != config.path:
        raise ValueError("a folder's name with *, ? or [ would be taken for a pattern; rename it")
    builder = datasets.load_dataset_builder(config.path, config.config_name)
    files = [str(one) for one in (builder.config.data_files or {}).get(config.split, ())]
    return files if all(_kind_suffix(Path(one)) in TEXT_KINDS for one in files) else []


def _load_aligned(config: DataConfig) -> datasets.Dataset:
    """Loads sources and references from two line-aligned text files."""
    sources = _load_file(config.path, "data.path")
    references = _load_file(str(config.reference_path), "data.reference_path")
    if sources.column_names != ["text"] or references.column_names != ["text"]:
        raise ConfigError(
            f"data.reference_path = {config.reference_path!r} is for two files of plain text; name "
            "the columns of one file with data.input_column and data.reference_column instead"
        )
    if len(sources) != len(references):
        raise ConfigError(
            f"data.path {config.path!r} has {len(sources)} lines but data.reference_path "
            f"{config.reference_path!r} has {len(references)}; they must be line-aligned"
        )
    return sources.rename_column("text", "source").add_column("reference", references["text"][:])


def _load_file(path: str, name: str, split: str = "train") -> datasets.Dataset:
    """Loads one local file; unknown suffixes (train.en) are read as lines of text. Rows of JSON and
    CSV become lines of JSON (column `LINE`), which are parsed one by one."""
    kind = _kind_suffix(Path(path))
    try:
        if kind == ".parquet":
            return datasets.load_dataset("parquet", data_files=glob.escape(path), split=split)
        if kind in (".json", ".csv", ".tsv") and (found := _read_objects(path, kind)) is not None:
            if split != "train":
                raise ValueError(f"Unknown split {split!r}: a file has 'train' alone")
            return datasets.Dataset.from_dict({LINE: [json.dumps(one) for one in found]})
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            if not file.read(1):  # `datasets` needs at least one row
                return datasets.Dataset.from_dict({"text": []})
        lines = datasets.load_dataset("text", data_files=glob.escape(path), split=split)
        if kind not in (".json", ".jsonl"):
            return lines
        return lines.rename_column("text", LINE).filter(str.strip, input_columns=LINE)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"{name} = {path!r} cannot be read as {kind[1:] if kind in KINDS else 'text'}: "
            f"{_innermost(error)}; mend the file, or give another"
        ) from None


def _read_objects(path: str, kind: str) -> list[Any] | None:
    """Reads the rows of a .json, .csv or .tsv file; None if .json has lines of JSON."""
    with (gzip.open if path.endswith(".gz") else open)(
        path, "rt", encoding="utf-8-sig", newline=""
    ) as file:
        if kind == ".json":
            try:
                found = json.load(file)
            except json.JSONDecodeError:
                return None
            return found if isinstance(found, list) else [found]
        csv.field_size_limit(2**31 - 1)
        names, *rows = filter(None, csv.reader(file, delimiter="\t" if kind == ".tsv" else ","))
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise ValueError(f"{twice.count(twice[0])} columns have the name {twice[0]!r}")
    return [dict(zip(names, row, strict=True)) if len(row) == len(names) else row for row in rows]


def _kind_suffix(path: Path) -> str:
    """Returns the lower-case suffix of a file, ignoring .gz."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 ({error}); convert it, as with iconv -f LATIN1 -t UTF-8"
    return f"{error}" or type(error).__name__
