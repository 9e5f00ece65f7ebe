"""Audio clips as inputs: what is read, and one line for each clip that cannot be read."""

import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.clips import read_speech
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.outputs import hash_inputs
from tests.tiny_speech import noise, save_clips

CLIPS = ["clip0.wav", "clip1.flac", "clip2.wav"]


def load(path: Path | str, **settings) -> datasets.Dataset:
    return load_inputs(DataConfig(path=str(path), **settings), audio=True)


def test_a_jsonl_names_files_next_to_it_and_their_transcripts(tmp_path):
    rows = load(save_clips(tmp_path))
    assert rows["row"][:] == [0, 1, 2]
    assert rows["source"][:] == CLIPS
    assert rows["reference"][:] == ["w10 w11", "w11 w12", "w12 w13"]
    assert rows["seconds"][:] == [1.0, 2.0, 3.0]
    audio = read_speech(rows[1])
    assert audio.dtype == np.float32
    assert np.abs(audio - noise(2.0, seed=1)).max() < 1e-4  # 16 bits per sample


def test_a_recording_or_a_folder_of_them_is_enough(tmp_path):
    save_clips(tmp_path / "some" / "below")
    assert load(tmp_path / "some")["source"][:] == [f"below/{n}" for n in CLIPS]
    one = load(tmp_path / "some/below/clip1.flac")
    assert (one["source"][:], one["reference"][:]) == (["clip1.flac"], [None])
    (tmp_path / "some/below/clip0.wav").write_bytes(b"")  # chosen before any clip is read
    assert load(tmp_path / "some/below/clips.jsonl", skip=1, limit=1)["row"][:] == [1]


@pytest.mark.parametrize("typed", [True, False], ids=["Audio", "bytes"])
def test_audio_columns_of_data_sets_are_read_by_us(tmp_path, typed):
    save_clips(tmp_path)
    contents = [(tmp_path / name).read_bytes() for name in CLIPS]
    audio = [{"bytes": own, "path": name} for own, name in zip(contents, CLIPS, strict=True)]
    rows = datasets.Dataset.from_dict({"audio": audio, "sentence": ["a", "b", "c"]})
    if typed:
        rows = rows.cast_column("audio", datasets.Audio(decode=False))
    rows.to_parquet(tmp_path / "rows.parquet")
    found = load(tmp_path / "rows.parquet")
    assert found["reference"][:] == ["a", "b", "c"]
    assert found["source"][:] == [f"row {n}, {name}" for n, name in enumerate(CLIPS)]
    assert np.array_equal(read_speech(found[2]), read_speech(load(tmp_path / "clip2.wav")[0]))
    rows.save_to_disk(tmp_path / "saved")
    assert load(tmp_path / "saved")["sha256"][:] == found["sha256"][:]


def test_a_tone_survives_resampling_and_mixing(tmp_path):
    tone = np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)
    both = np.stack([2 * tone, np.zeros(48_000)], axis=1)
    soundfile.write(tmp_path / "tone.wav", both, 48_000, subtype="FLOAT")
    rows = load(tmp_path)
    assert rows["seconds"][:] == [1.0]
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert np.abs(read_speech(rows[0]) - expected)[200:-200].max() < 1e-3


def test_clips_are_the_same_by_content_wherever_they_lie(tmp_path):
    first, second = load(save_clips(tmp_path / "a")), load(save_clips(tmp_path / "b"))
    assert hash_inputs(first) == hash_inputs(second)
    soundfile.write(tmp_path / "b" / "clip1.flac", noise(2.0, seed=9), 16_000)
    assert hash_inputs(load(tmp_path / "b" / "clips.jsonl")) != hash_inputs(first)


BAD = {
    "empty": (".wav", lambda wav, flac, long: b"", "cannot be read"),
    "no samples": (".wav", lambda wav, flac, long: wav[:40] + bytes(4), "holds 0 samples"),
    "truncated flac": (".flac", lambda wav, flac, long: flac[:-900], "cannot be read|holds"),
    "31 s": (".flac", lambda wav, flac, long: long, "lasts 31.0 s; give WAV, .* of 30 s"),
    "text": (".wav", lambda wav, flac, long: b"not a sound\n" * 9, "Format not recognised"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_unusable_clip_is_skipped_and_its_line_names_file_and_remedy(tmp_path, name):
    path = save_clips(tmp_path, 2)
    soundfile.write(tmp_path / "long.flac", noise(31.0), 16_000)
    contents = [(tmp_path / one).read_bytes() for one in ("clip0.wav", "clip1.flac", "long.flac")]
    suffix, spoil, message = BAD[name]
    bad = tmp_path / f"bad{suffix}"
    bad.write_bytes(spoil(*contents))
    with path.open("a") as lines:
        lines.write(json.dumps({"file": bad.name, "text": "w5"}) + "\n")
    *others, line = load(path)["reason"][:]
    assert others == [None, None] and re.search(message, line)
    assert line.startswith(f"clip '{bad.name}' ") and line.endswith(", or leave it out")
    assert "\n" not in line


def test_compressed_recordings_are_read_or_counted(tmp_path):
    for name in ("a.mp3", "b.ogg", "c.aiff"):
        soundfile.write(tmp_path / name, noise(1.0), 16_000)
    soundfile.write(tmp_path / "d.opus", noise(1.0), 16_000, format="OGG", subtype="OPUS")
    (tmp_path / "e.m4a").write_bytes(b"\0\0\0\x20ftypM4A ")
    (tmp_path / "notes.txt").write_text("no clip")
    rows = load(tmp_path)
    assert rows["source"][:] == ["a.mp3", "b.ogg", "c.aiff", "d.opus", ""]
    assert [reason is None for reason in rows["reason"][:]] == [True] * 4 + [False]
    assert "'e.m4a'" in rows["reason"][4]
    assert all(0.9 < seconds < 1.2 for seconds in rows["seconds"][:4])
    soundfile.write(tmp_path / "longest.flac", noise(30.0), 16_000)
    assert len(read_speech(load(tmp_path / "longest.flac")[0])) == 480_000


@pytest.mark.parametrize("name", ["../clip0.wav", "/etc/passwd", "link.wav"])
def test_files_outside_the_folder_are_not_opened(tmp_path, name):
    save_clips(tmp_path)
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link.wav").symlink_to(tmp_path / "clip0.wav")
    (inner / "rows.jsonl").write_text(json.dumps({"file": name, "text": "x"}) + "\n")
    with pytest.raises(ConfigError, match="lies outside .*; move it there"):
        load(inner / "rows.jsonl")


def test_rows_without_a_clip_or_of_texts_alone_are_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    for text, settings, message in (
        ('{"file": null, "text": "x"}\n{"file": "a.wav"}\n', {}, "row 0 names no clip"),
        ('{"text": "x"}\n', {}, "none of the columns audio, file; name .*input_column"),
        ('{"file": "missing.wav"}\n', {}, "'missing.wav' cannot be read"),
        ('{"file": "missing.wav"}\n', {"prefix": "x: "}, "data.prefix = 'x: ' is for texts"),
    ):
        rows.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(rows, **settings)
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "missing.flac")
