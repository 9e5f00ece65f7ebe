"""`drafttrain eval` at several batch sizes, with assisted generation beside our methods."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commanding import ended
from tests.small_pair import PAIR, SHORT, save_small_pair

BATCHES = [*PAIR, *SHORT, "--sweep", "k=2,4", "--batch-size", "2", "baselines=generate,assisted"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return save_small_pair(tmp_path_factory.mktemp("batch-commands"))


def test_a_report_has_every_batch_size_a_table_and_a_picture(inside, capsys):
    assert ended("eval", *BATCHES, "--report", "batches.json") == 0
    runs = json.loads(Path("batches.json").read_text())["runs"]
    sizes = {run["name"]: [one["batch_size"] for one in run["batches"]] for run in runs}
    assert sizes == {
        "plain": [1, 2],
        "causal k=2 greedy": [1, 2],
        "causal k=4 greedy": [1, 2],
        "generate": [1, 2],
        "assisted causal k=2, constant, confidence 0": [1],
        "assisted causal k=4, constant, confidence 0": [1],
    }
    assert all(one["differing"] == 0 for run in runs for one in run["batches"])
    printed = capsys.readouterr().out
    assert "batch" in printed and "memory" in printed
    assert Path("batches.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_says_what_would_be_measured(inside, capsys):
    assert ended("eval", *BATCHES, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("baseline") and "assisted" in line for line in lines)
    assert any(line.startswith("batch") and "1, 2" in line for line in lines)
