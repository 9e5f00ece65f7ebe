"""Makes clips of synthetic speech to train a speech drafter on, from texts of your own.

    apt-get install flite && pip install "drafttrain[audio]"
    python data/make_speech.py train.txt prompts.jsonl:prompt --out clips/train --clips 2000

A file has one text per line, or is a .jsonl file of which one field is read (`FILE:FIELD`); both
may be .gz. Texts are shuffled and joined into clips of random length, and spoken by a random Flite
voice at a random speed. Some clips get the echo of a room, some get noise at a random
signal-to-noise ratio. OUT/clips.jsonl has one row per clip: `file` (16 kHz FLAC, relative to OUT),
`text`, `seconds`, `voice`, `speed`, `echo` (seconds) and `noise` (dB).

A drafter learns its target's transcripts, right or wrong, so the voices need not be good. But it
learns the words of these texts, so they should resemble your recordings. Clips depend only on the
seed and their number: an interrupted run continues when the same command is run again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soundfile
from tqdm import tqdm

RATE = 16_000
CHARACTERS_A_SECOND = 14.0
"""Approximate characters per second of Flite at normal speed."""
LONGEST = 29.5
"""Maximal seconds of a clip; longer ones are left out and counted."""
SPEAKABLE = re.compile(r"[A-Za-z0-9 ,.;:!?'\"()%$&-]{8,240}")
"""Texts that are spoken; others (code, markup, tables) are left out and counted."""


@dataclass(frozen=True)
class Clip:
    """What one clip says, and how."""

    file: str
    text: str
    voice: str
    speed: float
    echo: float | None
    """Reverberation time of the room, seconds; None: no echo."""
    noise: float | None
    """Signal-to-noise ratio in dB; None: no noise."""


def read_texts(given: str) -> Iterator[str]:
    """Yields the lines of a file, or one field of its rows."""
    path, _, field = given.partition(":")
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line) if field else {field: line}
            if field not in row:
                sys.exit(f"{path}: a row has no field {field!r}, only {', '.join(row)}")
            yield str(row[field]).strip()


def plan(texts: Sequence[str], settings: argparse.Namespace) -> list[Clip]:
    """Returns the clips to make; each text is used once."""
    order = random.Random(f"{settings.seed}/order").sample(list(texts), len(texts))
    voices, speeds = settings.voices.split(","), [float(x) for x in settings.speeds.split(",")]
    clips: list[Clip] = []
    while order and len(clips) < settings.clips:
        number = len(clips)
        draw = random.Random(f"{settings.seed}/{number}")
        voice, speed = draw.choice(voices), draw.choice(speeds)
        wanted = draw.uniform(settings.shortest, settings.longest) * speed * CHARACTERS_A_SECOND
        echo = draw.uniform(0.1, 0.6) if draw.random() < settings.echo else None
        noise = draw.uniform(3.0, 30.0) if draw.random() < settings.noise else None
        spoken = [order.pop()]
        while order and sum(map(len, spoken)) + len(order[-1]) <= wanted:
            spoken.append(order.pop())
        text = " ".join(one if one[-1] in ".?!" else f"{one}." for one in spoken)
        file = f"{number // 1000:03d}/{number:06d}.flac"
        clips.append(Clip(file, text, voice, speed, echo, noise))
    return clips


def make(clip: Clip, number: int, settings: argparse.Namespace) -> None:
    """Speaks a clip and writes it under a temporary name, then renames it; skips existing ones."""
    path = settings.out / clip.file
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".speaking-") as workspace:
        text, wave, flac = (Path(workspace) / name for name in ("text", "a.wav", "a.flac"))
        text.write_text(clip.text + "\n", encoding="utf-8")
        stretch = f"duration_stretch={1 / clip.speed:.4f}"
        flite = [settings.flite, "-voice", clip.voice, "--setf", stretch, "-f", text, "-o", wave]
        subprocess.run(flite, check=True, capture_output=True)
        sound, rate = soundfile.read(wave, dtype="float64")
        if rate != RATE:
            sys.exit(f"voice {clip.voice} speaks at {rate} Hz; use voices of {RATE} Hz")
        random_ = np.random.default_rng((settings.seed, number))
        soundfile.write(flac, disturbed(sound, clip, random_), RATE, subtype="PCM_16")
        os.replace(flac, path)


def disturbed(sound: np.ndarray, clip: Clip, random_: np.random.Generator) -> np.ndarray:
    """Returns the sound with echo and noise, scaled if it would clip. Shapes: [T] -> [T]."""
    if clip.echo is not None:  # the impulse response of a room is exponentially decaying noise
        times = np.arange(int(clip.echo * RATE)) / RATE
        answer = random_.standard_normal(len(times)) * 10 ** (-3 * times / clip.echo)
        answer *= 0.5 / np.sqrt((answer**2).sum())
        answer[0] += 1.0
        size = len(sound) + len(answer)
        product = np.fft.rfft(sound, size) * np.fft.rfft(answer, size)
        sound = np.fft.irfft(product, size)[: len(sound)]
    if clip.noise is not None:  # between white (0) and pink (1)
        spectrum = np.fft.rfft(random_.standard_normal(len(sound)))
        spectrum /= np.maximum(np.arange(len(spectrum)), 1.0) ** (random_.uniform(0.0, 1.0) / 2)
        noise = np.fft.irfft(spectrum, len(sound))
        noise *= np.sqrt((sound**2).mean() / (noise**2).mean()) * 10 ** (-clip.noise / 20)
        sound = sound + noise
    return sound * min(1.0, 0.99 / max(np.abs(sound).max(), 1e-9))


def write_rows(clips: Sequence[Clip], out: Path) -> tuple[int, float]:
    """Writes clips.jsonl atomically; returns its number of clips and their seconds."""
    kept, total = 0, 0.0
    with tempfile.NamedTemporaryFile("w", dir=out, delete=False, encoding="utf-8") as rows:
        for clip in clips:
            seconds = soundfile.info(out / clip.file).duration
            if seconds > LONGEST:
                continue
            kept, total = kept + 1, total + seconds
            row = {"file": clip.file, "text": clip.text, "seconds": round(seconds, 2)}
            rows.write(json.dumps(row | asdict(clip), ensure_ascii=False) + "\n")
    os.chmod(rows.name, 0o644)
    os.replace(rows.name, out / "clips.jsonl")
    return kept, total


def read_settings() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("texts", nargs="+", metavar="FILE[:FIELD]")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--clips", type=int, default=2000, help="%(default)s")
    parser.add_argument("--shortest", type=float, default=3.0, help="seconds (%(default)s)")
    parser.add_argument("--longest", type=float, default=26.0, help="seconds (%(default)s)")
    parser.add_argument("--voices", default="slt,rms,awb", help="of `flite -lv` (%(default)s)")
    parser.add_argument("--speeds", default="0.9,1.0,1.15,1.3", help="normal: 1 (%(default)s)")
    parser.add_argument("--echo", type=float, default=0.4, help="share of clips (%(default)s)")
    parser.add_argument("--noise", type=float, default=0.5, help="share of clips (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="parallel clips (%(default)s)"
    )
    parser.add_argument("--flite", default="flite", help="the program (%(default)s)")
    settings = parser.parse_args()
    for given in settings.texts:
        if not Path(given.partition(":")[0]).is_file():
            sys.exit(f"no such file: {given.partition(':')[0]}")
    if not shutil.which(settings.flite):
        sys.exit(f"no program {settings.flite!r}; try apt-get install flite, or give --flite")
    answer = subprocess.run([settings.flite, "-lv"], capture_output=True, text=True, check=True)
    unknown = set(settings.voices.split(",")) - set(answer.stdout.split()[2:])
    if unknown:
        sys.exit(f"no voice {', '.join(sorted(unknown))}; flite has{answer.stdout.split(':')[-1]}")
    return settings


def main() -> None:
    settings = read_settings()
    texts = [text for given in settings.texts for text in read_texts(given) if text]
    speakable = list(dict.fromkeys(text for text in texts if SPEAKABLE.fullmatch(text)))
    print(f"{len(texts)} texts, {len(speakable)} of them speakable and different")
    clips = plan(speakable, settings)
    if len(clips) < settings.clips:
        print(f"these are enough for {len(clips)} clips only")
    with ThreadPoolExecutor(settings.jobs) as pool:
        made = pool.map(lambda pair: make(pair[1], pair[0], settings), enumerate(clips))
        for _ in tqdm(made, total=len(clips), desc="clips", unit="clip"):
            pass
    kept, seconds = write_rows(clips, settings.out)
    print(f"{settings.out / 'clips.jsonl'}: {kept} clips, {seconds / 3600:.1f} hours")
    if kept < len(clips):
        print(f"{len(clips) - kept} clips left out: longer than {LONGEST} s")


if __name__ == "__main__":
    main()
