"""Recordings of speech -> samples of one channel at 16 kHz, checked as they are decoded.

soundfile reads them; soxr resamples those of other rates. What a header says is compared with what
the file holds, and no clip is ever cut: those that do not fit are refused.
"""

from __future__ import annotations

import hashlib
import io
import struct
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from drafttrain.config.base import ConfigError

RATE = 16_000
"""Samples a second that speech models read."""
LONGEST = 30.0
"""Seconds that a speech model reads at once."""
MOST_BYTES = 1 << 28
"""No clip of 30 s takes so many."""
SUFFIXES = (".wav", ".flac")
"""Of the files that are looked for in a folder."""
FLAC_INFO, FLAC_SUM = slice(18, 26), slice(26, 42)
"""Where a FLAC file has its precision (among others), and the MD5 of its samples."""


@dataclass(frozen=True)
class Clip:
    """A recording that has not been decoded yet."""

    name: str
    """What messages call it."""
    path: Path | None = None
    content: bytes | None = None
    """What the file holds, where it lies inside a data set."""

    def read(self) -> bytes:
        """All bytes. Raises ConfigError for what cannot be a clip, before reading on."""
        if self.content is not None:
            content = self.content
        else:
            assert self.path is not None
            try:
                size = self.path.stat().st_size
                content = self.path.read_bytes() if size <= MOST_BYTES else b""
            except OSError as error:
                raise self.refused(f"cannot be read ({error.strerror})", "mend its name") from None
            if size > MOST_BYTES:
                raise self.refused(f"has {size:,} bytes", SHORTER)
        if not content:
            raise self.refused("is empty", ANOTHER)
        return content

    def refused(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"clip {self.name!r} {what}; {remedy}, or leave it out")


SHORTER = f"cut it into clips of {LONGEST:g} s or less"
ANOTHER = "record or copy it again"
CONVERT = "convert it to WAV or FLAC again"


@dataclass(frozen=True)
class Facts:
    """What a clip is like, as it was recorded."""

    seconds: float
    rate: int
    channels: int
    sha256: str
    """Of the file."""


def read_speech(clip: Clip) -> np.ndarray:
    """What a feature extractor is given: [T] float32, one channel at 16 kHz. Raises ConfigError."""
    samples, facts = decode(clip)
    samples = samples.mean(axis=1)
    if facts.rate == RATE:
        return samples
    return library("soxr").resample(samples, facts.rate, RATE)


def decode(clip: Clip) -> tuple[np.ndarray, Facts]:
    """A clip's samples, [T, channels] float32.

    Raises ConfigError, naming the clip, for what is no audio, is empty or damaged, is longer than
    30 s, or has a header that says otherwise than what follows it.
    """
    content = clip.read()
    if content[:4] == b"RIFF":
        check_chunks(clip, content)
    soundfile, lossless = library("soundfile"), content[:4] == b"fLaC"
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate, frames = file.samplerate, file.frames
            if frames > LONGEST * rate:
                raise clip.refused(f"lasts {frames / rate:,.1f} s by its header", SHORTER)
            dtype = "int32" if lossless else "float32"
            samples = file.read(int(LONGEST * rate) + 1, dtype=dtype, always_2d=True)
    except soundfile.LibsndfileError as error:
        what = "is no audio" if "Format not recognised" in str(error) else "is damaged"
        raise clip.refused(f"{what} ({error.error_string.rstrip('.')})", CONVERT) from None
    if len(samples) > LONGEST * rate:
        raise clip.refused(f"lasts more than {LONGEST:g} s, whatever its header says", SHORTER)
    if len(samples) != frames:
        found, said = len(samples) / rate, frames / rate
        raise clip.refused(f"holds {found:.2f} s, but its header says {said:.2f} s", CONVERT)
    if len(samples) == 0:
        raise clip.refused("holds no samples", ANOTHER)
    if lossless:
        check_sum(clip, content, samples)
        samples = samples.astype(np.float32) * np.float32(2.0**-31)
    if not np.isfinite(samples).all():
        raise clip.refused("has samples that are no numbers", CONVERT)
    digest = hashlib.sha256(content).hexdigest()
    return samples, Facts(len(samples) / rate, rate, samples.shape[1], digest)


def check_chunks(clip: Clip, content: bytes) -> None:
    """The chunks of a WAV file must fill it: it is truncated, or its header lies. Raises
    ConfigError."""
    place = 12
    while place + 8 <= len(content):
        [size] = struct.unpack_from("<I", content, place + 4)
        place += 8 + size + size % 2
    [whole] = struct.unpack_from("<I", content, 4) if len(content) >= 8 else [0]
    # a last chunk of odd size may lack its padding
    if place - len(content) not in (0, 1) or abs(whole + 8 - len(content)) > 1:
        raise clip.refused(
            f"has {len(content):,} bytes, which is not what its header says", CONVERT
        )


def check_sum(clip: Clip, content: bytes, samples: np.ndarray) -> None:
    """The MD5 of all samples in a FLAC file's header must be that of those decoded: they stop short
    of its end, or are damaged. Files without one pass. Raises ConfigError.

    Shapes: samples [T, channels] int32, as loud as they get.
    """
    [info] = struct.unpack(">Q", content[FLAC_INFO])
    bits, said = (info >> 36 & 31) + 1, content[FLAC_SUM]
    if not any(said):
        return
    numbers = (samples >> (32 - bits)).astype("<i4").reshape(-1, 1).view(np.uint8)
    found = hashlib.md5(numbers[:, : (bits + 7) // 8].tobytes(), usedforsecurity=False)
    if found.digest() != said:
        raise clip.refused("does not hold the samples that its header tells of", CONVERT)


def library(name: str) -> ModuleType:
    """A library of the extra `audio`. Raises ConfigError where it is not installed."""
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"audio needs {name}, which cannot be loaded ({error}); install drafttrain[audio]"
        ) from None
