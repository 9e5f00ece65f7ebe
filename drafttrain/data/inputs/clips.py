"""Recordings as inputs: rows of files, a folder, a jsonl of `file, text`, or a data set's audio.

soundfile reads the clips, soxr resamples them to 16 kHz. A clip is decoded once when it is listed,
so that an error comes before any model loads, and again when it is used; none is cut. Files that
rows name must lie in the folder of the file that names them.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.rows import REFERENCE_COLUMNS, find_column, select_rows

RATE = 16_000
"""Samples per second that speech models read."""
LONGEST = 30.0
"""Seconds that a speech model reads at once."""
MOST_BYTES = 1 << 28
"""No clip of 30 s takes so many."""
SUFFIXES = (".wav", ".flac")
"""Of the files that are looked for in a folder."""
AUDIO = "audio"
"""Column of rows that are clips: path or bytes."""
SECONDS = "seconds"
"""Column of their lengths."""
DIGESTS = "sha256"
"""Column of the SHA-256 of their files."""
CLIP_COLUMNS = (AUDIO, "file")
"""Columns that usually hold clips."""
WRITTEN_COLUMNS = ("text", "sentence", "transcription", "transcript", *REFERENCE_COLUMNS)
"""Columns that usually hold transcripts."""
TEXT_ONLY = ("reference_path", "template", "prefix", "suffix", "chat")
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


@dataclass(frozen=True)
class Clip:
    """A recording that has not been decoded yet."""

    name: str
    """Its name in messages."""
    path: Path | None = None
    content: bytes | None = None
    """The file's bytes, where it lies inside a data set."""

    def read(self) -> bytes:
        """All bytes. Raises ConfigError for a file that cannot be a clip, before reading on."""
        if self.path is None:
            return self.content or b""
        try:
            if (size := self.path.stat().st_size) > MOST_BYTES:
                raise self.refused(f"has {size:,} bytes")
            return self.path.read_bytes()
        except OSError as error:
            raise self.refused(f"cannot be read ({error.strerror})") from None

    def refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"clip {self.name!r} {what}; give WAV or FLAC of {LONGEST:g} s or less, or leave it out"
        )


def decode(clip: Clip) -> tuple[np.ndarray, int, str]:
    """A clip's samples, [T, channels] float32, their rate, and the SHA-256 of its file.

    Raises ConfigError, naming the clip, for a file that soundfile cannot read, that is empty or
    damaged, or longer than 30 s.
    """
    content, soundfile = clip.read(), library("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate, frames = file.samplerate, file.frames
            if frames > LONGEST * rate:
                raise clip.refused(f"lasts {frames / rate:,.1f} s")
            samples = file.read(dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise clip.refused(f"cannot be read ({error.error_string.rstrip('.')})") from None
    if len(samples) != frames or len(samples) == 0:
        raise clip.refused(f"holds {len(samples)} samples where its header says {frames}")
    if not np.isfinite(samples).all():
        raise clip.refused("has samples that are no numbers")
    return samples, rate, hashlib.sha256(content).hexdigest()


def read_speech(clip: Clip) -> np.ndarray:
    """The input of a feature extractor: [T] float32, one channel at 16 kHz. Raises ConfigError."""
    samples, rate, _ = decode(clip)
    samples = samples.mean(axis=1)
    return samples if rate == RATE else library("soxr").resample(samples, rate, RATE)


def library(name: str) -> ModuleType:
    """A library of the extra `audio`. Raises ConfigError where it is not installed."""
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"audio needs {name}, which cannot be loaded ({error}); install drafttrain[audio]"
        ) from None


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

    Raises ConfigError for columns that are not there or hold something else, and naming the clip
    for one that cannot be used.
    """
    for name, kind in rows.features.items():
        if isinstance(kind, datasets.Audio):
            rows = rows.cast_column(name, datasets.Audio(decode=False))
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
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        facts = list(pool.map(measure, clips))
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
            "seconds": [seconds for seconds, _ in facts],
            "sha256": [digest for _, digest in facts],
        },
        features=FEATURES,
    )


def measure(clip: Clip) -> tuple[float, str]:
    """Seconds of a clip that can be decoded, and the SHA-256 of its file. Raises ConfigError."""
    samples, rate, digest = decode(clip)
    return len(samples) / rate, digest


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


def clip_of(row: Mapping[str, Any]) -> Clip:
    """The clip of a row of `as_clips`."""
    path = row[AUDIO]["path"]
    return Clip(row["source"], None if path is None else Path(path), row[AUDIO]["bytes"])
