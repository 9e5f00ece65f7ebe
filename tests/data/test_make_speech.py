"""Synthetic clips: text and voice depend only on the seed; a stub program replaces Flite."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

SCRIPT = Path(__file__).parents[2] / "data" / "make_speech.py"
FLITE = f"""#!{sys.executable}
import array, math, sys, wave
if "-lv" in sys.argv:
    print("Voices available: slt rms")
    sys.exit()
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
samples = int(16000 * len(open(given["-f"]).read()) / 14)
with wave.open(given["-o"], "wb") as file:
    file.setparams((1, 2, 16000, samples, "NONE", ""))
    file.writeframes(array.array("h", (int(9999 * math.sin(i / 36)) for i in range(samples))))
"""


@pytest.fixture
def inside(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("flite").write_text(FLITE)
    os.chmod("flite", 0o755)
    words = "one two three four five six seven eight nine ten".split()
    lines = [f"This is sentence {a} {b}" for a in words for b in words]
    Path("texts.txt").write_text("\n".join([*lines, "x = {1: [2]}", lines[0]]) + "\n")
    rows = [{"prompt": f"Say {word} again, please."} for word in words]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def make(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *arguments, "--flite", "./flite", "--jobs", "1"]
    return subprocess.run(command, capture_output=True, text=True)


CLIPS = ("texts.txt", "rows.jsonl:prompt", "--clips", "6", "--voices", "slt,rms")
CLIPS += ("--shortest", "3", "--longest", "8")


def test_clips_have_the_requested_lengths_and_are_reproducible(inside):
    done = make(*CLIPS, "--out", "one")
    assert done.returncode == 0, done.stderr
    assert "112 texts, 110 of them speakable and different" in done.stdout
    rows = [json.loads(line) for line in Path("one/clips.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and len({row["text"] for row in rows}) == 6
    for row in rows:
        facts = soundfile.info(Path("one", row["file"]))
        assert facts.samplerate == 16_000 and facts.channels == 1
        assert row["seconds"] == pytest.approx(facts.duration, abs=0.01)
        assert 1 < row["seconds"] < 12 and row["voice"] in ("slt", "rms")
        assert row["text"][-1] == "."
    assert {row["noise"] is None for row in rows} == {True, False}
    clip, first = Path("one", rows[3]["file"]), Path("one/clips.jsonl").read_text()
    before, _ = soundfile.read(clip)
    clip.unlink()  # as after an interruption
    assert make(*CLIPS, "--out", "one").returncode == 0
    assert Path("one/clips.jsonl").read_text() == first
    after, _ = soundfile.read(clip)
    assert len(before) == len(after) and abs(before - after).max() < 1e-4
    assert not list(Path().rglob(".speaking-*"))


def test_a_field_that_rows_lack_is_named(inside):
    done = make("rows.jsonl:question", "--out", "one", "--voices", "slt")
    assert done.returncode == 1
    assert "rows.jsonl: a row has no field 'question', only prompt" in done.stderr
    assert not Path("one").exists()
