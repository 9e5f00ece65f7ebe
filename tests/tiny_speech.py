"""A tiny Whisper on disk, and audio files with noise."""

import json
from pathlib import Path

import numpy as np
import soundfile
from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

from tests.tiny_models import MEL_BINS, VOCAB, tiny_model

FRAMES_A_CLIP = 30
"""One frame per second: features always cover 30 s."""


def save_whisper(folder: Path) -> Path:
    """Saves a target for `load_target`: a multilingual Whisper of 40 tokens."""
    model = tiny_model("whisper", max_source_positions=FRAMES_A_CLIP // 2).float()
    model.save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCAB)} | {"<|endoftext|>": VOCAB}
    tokenizer = WhisperTokenizer(vocab=words, merges=[])
    features = WhisperFeatureExtractor(feature_size=MEL_BINS, hop_length=16_000)
    WhisperProcessor(features, tokenizer).save_pretrained(folder)
    return folder


def noise(seconds: float, rate: int = 16_000, seed: int = 0) -> np.ndarray:
    """Returns noise [T], float32, whose volume grows with the seed."""
    generator = np.random.default_rng(seed)
    return 0.02 * (1 + seed) * generator.standard_normal(int(seconds * rate)).astype(np.float32)


def save_clips(folder: Path, count: int = 3) -> Path:
    """Saves audio files and clips.jsonl with their names and transcripts in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        name = f"clip{number}.{('wav', 'flac')[number % 2]}"
        soundfile.write(folder / name, noise(1.0 + number, seed=number), 16_000)
        rows.append({"file": name, "text": f"w{10 + number} w{11 + number}"})
    path = folder / "clips.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
