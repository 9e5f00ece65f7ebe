"""Pictures of how runs learn, from the metrics that runs leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.curves import draw_curves, read_curve

LENGTHS = [1.5, 2.0]


def leave_metrics(run: Path, timed: bool = True) -> Path:
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        for step, length in enumerate(LENGTHS, start=1):
            seconds = {"seconds": 90.0 * step} if timed else {}
            file.write(json.dumps({"step": step, "loss": 1.0} | seconds) + "\n")
            validation = {"mean_acceptance_length": length}
            file.write(json.dumps({"step": step} | seconds | validation) + "\n")
    return run


def test_lines_are_the_measure_by_steps_and_minutes(tmp_path: Path) -> None:
    figure = draw_curves({"own": leave_metrics(tmp_path / "run")}, "mean_acceptance_length")
    by_steps, by_minutes = (axis.lines[0] for axis in figure.axes)
    assert by_steps.get_xydata().tolist() == [[1.0, 1.5], [2.0, 2.0]]
    assert by_minutes.get_xydata().tolist() == [[1.5, 1.5], [3.0, 2.0]]


def test_runs_that_do_not_say_how_long_they_took_are_drawn_by_steps(tmp_path: Path) -> None:
    runs = {"a": leave_metrics(tmp_path / "a"), "b": leave_metrics(tmp_path / "b", timed=False)}
    [axis] = draw_curves(runs, "mean_acceptance_length").axes
    assert len(axis.lines) == 2 and axis.get_xlabel() == "steps"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl; give the folder of a run"):
        read_curve(tmp_path, "loss")
    run = leave_metrics(tmp_path / "run")
    with pytest.raises(ValueError, match="no 'perplexity'; it has loss, mean_acceptance_length"):
        read_curve(run, "perplexity")
