"""Reports of former versions: the numbers stay, names and sizes become fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafttrain.evaluation.report import read_report
from drafttrain.evaluation.tables import main_table, markdown_table
from drafttrain.evaluation.trees.comparison import compared_by, tree_groups, tree_name

FORMER = Path(__file__).with_name("former_report.json")
"""Written by the last version that had sizes in names, cut to a few runs."""


def former_run(**facts: object) -> dict:
    written = json.loads(FORMER.read_text())
    [run] = [run for run in written["runs"] if run["kind"] == "method"][:1]
    return run | facts


def test_a_former_report_is_read_with_its_numbers():
    written, report = json.loads(FORMER.read_text()), read_report(FORMER)
    assert len(report.runs) == len(written["runs"]) == 3
    for run, before in zip(report.runs, written["runs"], strict=True):
        for name, estimate in before["metrics"].items():
            name = "mean_acceptance_length" if name == "tokens_per_round" else name
            assert run.metrics[name].value == estimate["value"]
        rates = run.acceptance_rate_per_position
        assert (rates is None) == (before["by_position"] is None)
        if rates is not None:
            assert rates.accepted == before["by_position"]["accepted"]
    assert [(run.method, run.sizes) for run in report.runs] == [
        ("plain", {}),
        ("rsd-s", {"depth": 4, "nodes": 12, "width": 3}),
        ("generate", {}),
    ]
    assert "| rsd-s(3) k=4 recursive | 2.77" in markdown_table(report, intervals=False)
    assert main_table(report) is not None


@pytest.mark.parametrize(
    ("drafter", "stop", "settings", "method", "sizes"),
    [
        ("causal", "k=5", {"k": 5.0}, "chain", {"depth": 5, "nodes": 5, "k": 5}),
        ("causal", "k=6", {"depth": 6.0, "nodes": 6.0}, "chain", {"depth": 6, "nodes": 6, "k": 6}),
        ("causal", "head(0.7)", {"h": 0.7}, "chain", {}),
        (
            "paths(1)+paths(1)",
            "k=3",
            {"depth": 3, "nodes": 6},
            "paths",
            {"width": 1, "drafters": 2},
        ),
        ("rsd-c(2,2,1)", "k=3", {"depth": 3, "nodes": 10}, "rsd-c", {"branching": [2, 2, 1]}),
        ("spec-drafter rsd-s(3)", "k=2", {"depth": 2, "nodes": 6}, "rsd-s", {"width": 3}),
        ("opt-tree(25,head)", "k=5", {"depth": 5, "nodes": 25}, "opt-tree,head", {}),
        (
            "opt-tree(9)",
            "gain(0.2,20)",
            {"depth": 20, "nodes": 9, "delta": 0.2},
            "opt-tree",
            {"max_draft": 20},
        ),
        (
            "cascade base>small>max-gram 5,3,0/4,10/10 l=3",
            "k=8",
            {"k": 8.0},
            "cascade",
            {"depth": 8, "nodes": 8, "increments": [[5, 3, 0], [4, 10], [10]], "k": 8},
        ),
    ],
)
def test_sizes_are_read_from_former_names(tmp_path, drafter, stop, settings, method, sizes):
    run = former_run(drafter=drafter, stop=stop, settings=settings)
    written = json.loads(FORMER.read_text()) | {"runs": [run]}
    (tmp_path / "report.json").write_text(json.dumps(written))
    [found] = read_report(tmp_path / "report.json").runs
    shared = {name: settings[name] for name in ("depth", "nodes") if name in settings}
    assert (found.method, found.sizes) == (method, shared | sizes)
    assert found.settings == {n: v for n, v in settings.items() if n not in ("depth", "nodes")}


def test_beams_of_a_former_baseline_are_sizes(tmp_path):
    baseline = json.loads(FORMER.read_text())["runs"][2] | {"name": "generate beam 5"}
    written = json.loads(FORMER.read_text()) | {"runs": [baseline]}
    (tmp_path / "report.json").write_text(json.dumps(written))
    [found] = read_report(tmp_path / "report.json").runs
    assert (found.method, found.sizes) == ("beam", {"beams": 5})


def test_trees_of_a_former_report_are_compared_as_before(tmp_path):
    runs = [
        former_run(drafter=drafter, verifier=rule, settings={"depth": 2.0, "nodes": nodes})
        for drafter, rule, nodes in (
            ("causal", "rejection", 2.0),
            ("paths(2)", "k-seq", 4.0),
            ("rsd-c(2,1)", "recursive", 4.0),
        )
    ]
    runs[0]["stop"] = "k=2"
    written = json.loads(FORMER.read_text()) | {"runs": runs, "compared_by": "depth"}
    (tmp_path / "report.json").write_text(json.dumps(written))
    report = read_report(tmp_path / "report.json")
    assert compared_by(report) == "depth"
    [group] = tree_groups(report)
    assert [tree_name(run) for run in group.runs] == ["sd", "spectr(2)", "rsd-c(2,1)"]
