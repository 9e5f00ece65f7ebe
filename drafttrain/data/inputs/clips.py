"""Audio clips as inputs (files, a folder, a jsonl of `file, text`, or a data set's audio), and
their features for a speech target.

soundfile reads the clips, soxr resamples them to 16 kHz. Clips are decoded once when they are
listed, so that unusable ones are found before any model loads, and again when they are used. They
are never truncated. Files named in rows must be in the folder of the file that names them.
"""

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.chats import Refused, reference_of
from drafttrain.data.inputs.rows import FEATURES as TEXT_FEATURES
from drafttrain.data.inputs.rows import (
    REASON,
    REFERENCE_COLUMNS,
    cell_of,
    column_names,
    find_column,
    iterate_rows,
)
from drafttrain.decoding.engine.speech import speech_source
from drafttrain.decoding.types import Source
from drafttrain.models.loading import LoadedTarget

RATE, LONGEST = 16_000, 30.0
"""Sample rate of speech models in Hz, and maximal clip length in seconds."""
SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".m4a", ".aac", ".wma")
"""Suffixes of audio files in a folder."""
AUDIO, SECONDS, DIGESTS = "audio", "seconds", "sha256"
"""Columns of the clips (path or bytes), of their lengths, and of the SHA-256 of their files."""
CLIP_COLUMNS = (AUDIO, "file")
TRANSCRIPT_COLUMNS = ("text", "sentence", "transcription", "transcript", *REFERENCE_COLUMNS)
"""Usual names of columns with clips and with transcripts."""
FEATURES = datasets.Features(
    **TEXT_FEATURES,
    audio={"path": datasets.Value("string"), "bytes": datasets.Value("binary")},
    seconds=datasets.Value("float64"),
    sha256=datasets.Value("string"),
)


def find_files(path: Path) -> datasets.Dataset | None:
    """Returns the audio file at a path, or all below a folder, as rows; None if there are none."""
    folder, below = (path, path.rglob("*")) if path.is_dir() else (path.parent, [path])
    files = sorted(one.relative_to(folder) for one in below if one.suffix.lower() in SUFFIXES)
    if not files:
        return None
    return datasets.Dataset.from_dict({"file": [file.as_posix() for file in files]})


def as_clips(
    rows: datasets.Dataset, numbers: Sequence[int], config: DataConfig
) -> datasets.Dataset:
    """Checks the clips of the numbered rows; returns `row`, `source` (the clip's name),
    `reference`, `audio`, `seconds` and `sha256` (of the file), or `reason` if a clip is unusable.
    Raises ConfigError for settings that apply to texts only and for missing columns."""
    text_settings = ("reference_path", "template", "prefix", "suffix", "chat")
    check_unread(config, text_settings, prefix="data.")
    for name, kind in rows.features.items():
        if isinstance(kind, datasets.Audio):
            rows = rows.cast_column(name, datasets.Audio(decode=False))
    rows = rows.select(numbers)
    names = column_names(rows, config.path)
    column = find_column(names, config, "input_column", CLIP_COLUMNS)
    if column is None:
        raise ConfigError(
            f"{config.path!r} has none of the columns {', '.join(CLIP_COLUMNS)}; name the one with "
            f"files or audio with data.input_column (there are: {', '.join(names)})"
        )
    written = find_column(names, config, "reference_column", TRANSCRIPT_COLUMNS)
    folder = Path(config.path).resolve()
    folder = folder if folder.is_dir() else folder.parent

    def read(number: int, row: dict[str, Any] | Refused) -> dict[str, Any]:
        found = dict.fromkeys(FEATURES) | {"row": number, "source": "", SECONDS: 0.0, DIGESTS: ""}
        try:
            if isinstance(row, Refused):
                raise row
            name, audio = find_clip(cell_of(row, column), number, folder)
            samples, rate = decode(name, audio)
            content = audio["bytes"] or Path(audio["path"]).read_bytes()
        except (Refused, ValueError, OSError) as error:
            return found | {REASON: str(error)}
        found |= {"source": name, AUDIO: audio, "reference": reference_of(cell_of(row, written))}
        digest = hashlib.sha256(content).hexdigest()
        return found | {SECONDS: len(samples) / rate, DIGESTS: digest}

    library("soundfile")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        clips = list(pool.map(read, numbers, iterate_rows(rows)))
    found = datasets.Dataset.from_list(clips, features=FEATURES)
    found.info.description = f"column {column!r}"
    return found


def check_unread(settings: Config, names: Sequence[str], prefix: str = "") -> None:
    """Raises ConfigError if a setting for texts is given with a target that takes audio."""
    for name in names:
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            raise ConfigError(
                f"{prefix}{name} = {str(value)!r} is for texts, but the target takes audio; leave "
                "it out"
            )


def find_clip(value: Any, row: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns a clip's name for messages, and its path or bytes. The cell has a file name, or audio
    of a data set. Raises ConfigError for other cells and for files outside the folder."""
    content = None
    if isinstance(value, Mapping):
        content, value = value.get("bytes"), value.get("path")
    if content is not None:
        name = f"row {row}" if value is None else f"row {row}, {Path(value).name}"
        return name, {"path": None, "bytes": content}
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"row {row} names no clip ({value!r}); give a file's name, or name another column with "
            "data.input_column"
        )
    path = (folder / value).resolve()
    if not path.is_relative_to(folder):
        raise ConfigError(
            f"row {row}: clip {value!r} lies outside {str(folder)!r}; move it there, or leave the "
            "row out"
        )
    return value, {"path": str(path), "bytes": None}


def decode(name: str, audio: Mapping[str, Any]) -> tuple[np.ndarray, int]:
    """Returns a clip's samples, [T, channels] float32, and the sample rate in Hz. Raises
    ConfigError, naming the clip, for a file that soundfile cannot read, that is empty or damaged,
    or longer than 30 s."""
    soundfile = library("soundfile")
    content = audio["path"] if audio["bytes"] is None else io.BytesIO(audio["bytes"])
    try:
        with soundfile.SoundFile(content) as file:
            rate, frames = file.samplerate, file.frames
            short = frames <= LONGEST * rate
            samples = file.read(dtype="float32", always_2d=True) if short else None
        if samples is None:
            wrong = f"lasts {frames / rate:,.1f} s"
        elif len(samples) != frames or frames == 0:
            wrong = f"holds {len(samples)} samples where its header says {frames}"
        elif not np.isfinite(samples).all():
            wrong = "has samples that are no numbers"
        else:
            return samples, rate
    except soundfile.LibsndfileError as error:
        wrong = f"cannot be read ({error.error_string.rstrip('.')})"
    raise ConfigError(
        f"clip {name!r} {wrong}; give WAV, FLAC, MP3 or OGG of {LONGEST:g} s or less, or leave it "
        "out"
    )


def read_speech(row: Mapping[str, Any]) -> np.ndarray:
    """Reads a row of `as_clips` as [T] float32, mono, at 16 kHz. Raises as `decode` does."""
    samples, rate = decode(row["source"], row[AUDIO])
    samples = samples.mean(axis=1)
    return samples if rate == RATE else library("soxr").resample(samples, rate, RATE)


def clip_source(target: LoadedTarget, row: Mapping[str, Any]) -> Source:
    """Returns the source of a row of `as_clips`: log-mel features and decoder prefix. Raises
    ConfigError for a clip that has become unusable."""
    assert target.processor is not None
    features = target.processor.feature_extractor(
        read_speech(row), sampling_rate=RATE, return_tensors="pt"
    )
    return speech_source(features["input_features"][0], target.model)


def library(name: str) -> ModuleType:
    """Imports a library of the extra `audio`. Raises ConfigError if it cannot be loaded."""
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"audio needs {name}, which cannot be loaded ({error}); install drafttrain[audio]"
        ) from None
