"""Rows of recordings: files, a folder of them, a jsonl of `file, text`, or a data set's audio.

A clip is decoded once when it is listed, so that what is wrong with it is said before any model
loads, and again when it is used. Files that rows name must lie in the folder of what names them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.audio import RATE, SUFFIXES, Clip, Facts, decode
from drafttrain.data.inputs.rows import REFERENCE_COLUMNS, find_column, select_rows
from drafttrain.data.shards.writing import say

AUDIO = "audio"
"""Column of rows that are clips: what `Clip` holds."""
SECONDS = "seconds"
"""Column of their lengths."""
DIGESTS = "sha256"
"""Column of what their files hold, as SHA-256."""
CLIP_COLUMNS = (AUDIO, "file")
"""Where clips are looked for."""
WRITTEN_COLUMNS = ("text", "sentence", "transcription", "transcript", *REFERENCE_COLUMNS)
"""Where what was said is looked for."""
TEXT_ONLY = ("reference_path", "template", "prefix", "suffix", "chat", "splices")
TEXT_ONLY += ("source_language", "target_language")
"""Settings of texts."""
FEATURES = datasets.Features(
    row=datasets.Value("int64"),
    source=datasets.Value("string"),
    reference=datasets.Value("string"),
    audio={"path": datasets.Value("string"), "bytes": datasets.Value("binary")},
    seconds=datasets.Value("float64"),
    sha256=datasets.Value("string"),
)


def check_clip_settings(config: DataConfig) -> None:
    """Refuse settings that count for texts alone. Raises ConfigError."""
    for field in TEXT_ONLY:
        if (value := getattr(config, field)) != DataConfig.model_fields[field].default:
            raise ConfigError(
                f"data.{field} = {value!r} is for texts, but the target hears audio; leave it out"
            )


def find_files(path: Path) -> datasets.Dataset | None:
    """Rows of the recordings that a path is, or has below it; None where there are none."""
    if path.is_dir():
        below = [Path(top, name) for top, _, names in os.walk(path) for name in names]
        files = sorted(one.relative_to(path) for one in below if one.suffix.lower() in SUFFIXES)
    else:
        files = [Path(path.name)] if path.suffix.lower() in SUFFIXES else []
    if not files:
        return None
    return datasets.Dataset.from_dict({"file": [file.as_posix() for file in files]})


def as_clips(rows: datasets.Dataset, config: DataConfig) -> datasets.Dataset:
    """The rows asked for, their clips checked: `row`, `source` (the clip's name), `reference`,
    `audio`, `seconds` and `sha256` (of the file).

    One line says which are resampled or mixed down. Raises ConfigError for columns that are not
    there or hold something else, and naming the clip for one that cannot be used.
    """
    undecoded = datasets.Audio(decode=False)
    for name, kind in rows.features.items():
        if isinstance(kind, datasets.Audio):
            rows = rows.cast_column(name, undecoded)
    column = find_column(rows, config, "input_column", CLIP_COLUMNS)
    if column is None:
        raise ConfigError(
            f"{config.path!r} has none of the columns {', '.join(CLIP_COLUMNS)}; name the one with "
            f"files or audio with data.input_column (there are: {', '.join(rows.column_names)})"
        )
    written = find_column(rows, config, "reference_column", WRITTEN_COLUMNS)
    numbers = select_rows(rows, config)
    chosen = rows.select(numbers)
    folder = Path(config.path).resolve()
    if not folder.is_dir():
        folder = folder.parent
    clips = [
        as_clip(value, number, folder)
        for number, value in zip(numbers, chosen[column], strict=True)
    ]
    sounds = check_clips(clips)
    tell_changes(sounds, config.path)
    references = [None] * len(clips) if written is None else chosen[written][:]
    return datasets.Dataset.from_dict(
        {
            "row": list(numbers),
            "source": [clip.name for clip in clips],
            "reference": [None if text is None else str(text) for text in references],
            "audio": [
                {"path": None if clip.path is None else str(clip.path), "bytes": clip.content}
                for clip in clips
            ],
            "seconds": [sound.seconds for sound in sounds],
            "sha256": [sound.sha256 for sound in sounds],
        },
        features=FEATURES,
    )


def as_clip(value: Any, row: int, folder: Path) -> Clip:
    """What a cell holds: a file's name, or audio of a data set. Raises ConfigError for anything
    else, and for files outside the folder."""
    content = None
    if isinstance(value, Mapping):
        content, value = value.get("bytes"), value.get("path")
    if content is not None:
        name = "" if value is None else f", {Path(value).name}"
        return Clip(f"row {row}{name}", content=content)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"row {row} names no clip ({value!r}); give a file's name, or name another column with "
            "data.input_column"
        )
    path = (folder / value).resolve()
    if not path.is_relative_to(folder):
        raise ConfigError(
            f"row {row}: clip {value!r} lies outside {str(folder)!r}; move it there, beside or "
            "below the file that names it, or leave the row out"
        )
    return Clip(value, path)


def check_clips(clips: Sequence[Clip]) -> list[Facts]:
    """What there is to say of each clip. Raises ConfigError for the first that is no good."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda clip: decode(clip)[1], clips))


def tell_changes(sounds: Sequence[Facts], path: str) -> None:
    """Say on one line which clips a target does not hear as they were recorded."""
    rates = Counter(sound.rate for sound in sounds if sound.rate != RATE)
    mixed = sum(sound.channels > 1 for sound in sounds)
    told = [f"{count} resampled from {rate / 1e3:g} to 16 kHz" for rate, count in rates.items()]
    told += [f"{mixed} mixed down to one channel"] if mixed else []
    if told and os.environ.get("RANK", "0") == "0":
        say(f"{path}: of {len(sounds)} clips " + ", ".join(told))


def clip_of(row: Mapping[str, Any]) -> Clip:
    """The clip of a row of `as_clips`."""
    path = row[AUDIO]["path"]
    return Clip(row["source"], None if path is None else Path(path), row[AUDIO]["bytes"])
