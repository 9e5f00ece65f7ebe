"""benchmarks/gpu_day.py, run on a CPU; the measurements of a failed stage are kept."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_day
from tests.commanding import ended

STAGE = """#!/bin/sh
case "$*" in *quickstart*) sleep 60;; esac
echo '{"model": "tiny"}' > OUT/calls.jsonl
echo "no such device"
exit 1
"""
"""Instead of Python: never ends as one stage, fails after a row as another."""


def rehearsed(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Rehearses a stage in this process, where it also trains. Calls of the shapes to compile run
    uncompiled; tests/decoding/engine/test_compiling.py traces them."""
    monkeypatch.setattr("torch.compile", lambda step, **options: step)
    monkeypatch.setattr(
        gpu_day, "train", lambda recipe, run, own: ended("train", recipe, f"run={run}", *own)
    )
    monkeypatch.chdir(gpu_day.ROOT)
    gpu_day.main(["--stage", name, "--out", str(out), "--rehearse"])
    return [*map(json.loads, (out / f"{name}.jsonl").read_text().splitlines())]


def test_the_rehearsal_decodes_the_quickstart(tmp_path, monkeypatch):
    decoded = [row for row in rehearsed("quickstart", tmp_path, monkeypatch) if "batch" in row]
    ways = {f"{name}, {how}" for name in ("plain", "Spec-Drafter") for how in ("eager", "compiled")}
    assert {row["way"] for row in decoded} == ways | {"generate", "beam 5"}
    assert all(row["equal to generate"] == 2 for row in decoded if row["way"] != "beam 5")


def test_the_rehearsal_times_every_shape(tmp_path, monkeypatch):
    calls = rehearsed("calls", tmp_path, monkeypatch)
    shapes = {(row["model"], row["how"], row["new tokens"]) for row in calls}
    assert len(shapes) == len(calls) == len(gpu_day.SHAPES) * 2 * 3
    assert all(row["ms per call"] > 0 < row["ms to read the weights"] for row in calls)


def test_a_stage_that_fails_or_is_cut_off_does_not_end_the_day(tmp_path, monkeypatch, capsys):
    """Later stages run, and results and table show the failure."""
    program = tmp_path / "program"
    program.write_text(STAGE.replace("OUT", str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    stages = ["--stages=calls,quickstart", "--minutes=0.04"]
    gpu_day.main(["--rehearse", f"--out={tmp_path}", *stages])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [stage["outcome"] for stage in results.values()] == ["failed", "cut off"]
    assert results["calls"]["error"] == "no such device"
    assert results["calls"]["rows"] == [{"model": "tiny"}]
    assert "## calls: failed" in capsys.readouterr().out


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_day.main([f"--out={tmp_path}"])
    assert "--rehearse runs tiny sizes on a CPU" in capsys.readouterr().err
