"""Pictures of how runs learn, from the metrics that runs leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.curves import draw_curves, read_curve

LENGTHS = [1.5, 2.0]


def leave_metrics(run: Path) -> Path:
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        for step, length in enumerate(LENGTHS, start=1):
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
            file.write(json.dumps({"step": step, "mean_acceptance_length": length}) + "\n")
    return run


def test_lines_are_the_measure_by_steps(tmp_path: Path) -> None:
    runs = {name: leave_metrics(tmp_path / name) for name in ("own", "other")}
    [axis] = draw_curves(runs, "mean_acceptance_length").axes
    assert [line.get_label() for line in axis.lines] == ["own", "other"]
    for line in axis.lines:
        assert line.get_xydata().tolist() == [[1.0, 1.5], [2.0, 2.0]]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl; give the folder of a run"):
        read_curve(tmp_path, "loss")
    run = leave_metrics(tmp_path / "run")
    with pytest.raises(ValueError, match="no 'perplexity'; it has loss, mean_acceptance_length"):
        read_curve(run, "perplexity")
