"""benchmarks/gpu_day.py, run on a CPU; the measurements of a failed stage are kept."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import gpu_day
from drafttrain.decoding.engine import compiling


def options(out: Path, device: str = "cpu") -> argparse.Namespace:
    return argparse.Namespace(out=out, device=device, rehearse=True, multi30k=None)


def rehearsed(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    gpu_day.run_stage(name, options(out))
    return [*map(json.loads, (out / f"{name}.jsonl").read_text().splitlines())]


def test_the_rehearsal_decodes_the_quickstart(tmp_path, monkeypatch):
    decoded = [row for row in rehearsed("quickstart", tmp_path, monkeypatch) if "batch" in row]
    ways = {f"{name}, {how}" for name in ("plain", "Spec-Drafter") for how in ("eager", "compiled")}
    assert {row["way"] for row in decoded} == ways | {"generate", "beam 5"}
    assert all(row["equal to generate"] == 3 for row in decoded if row["way"] != "beam 5")


def test_the_rehearsal_times_every_shape(tmp_path, monkeypatch):
    calls = rehearsed("calls", tmp_path, monkeypatch)
    shapes = {(row["model"], row["how"], row["new tokens"]) for row in calls}
    assert len(shapes) == len(calls) == len(gpu_day.SHAPES) * 2 * 3
    assert all(row["ms per call"] > 0 < row["ms to read the weights"] for row in calls)


def test_a_stage_that_fails_or_is_cut_off_does_not_end_the_day(tmp_path, monkeypatch, capsys):
    """Later stages run, and results and table show the failure."""

    def start(name, given, limit, own=gpu_day.start_stage):
        other = argparse.Namespace(out=given.out, device="no-device", rehearse=False, multi30k=None)
        return own(name, other, limit) if name == "calls" else own(name, given, 0.01)

    monkeypatch.setattr(gpu_day, "start_stage", start)
    gpu_day.main(["--rehearse", "--stages=calls,quickstart", f"--out={tmp_path}"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [stage["outcome"] for stage in results.values()] == ["failed", "cut off"]
    assert "device" in results["calls"]["error"]
    assert "## calls: failed" in capsys.readouterr().out


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_day.main([f"--out={tmp_path}"])
    assert "--rehearse runs tiny sizes on a CPU" in capsys.readouterr().err
