"""`drafttrain export` from the command line: what it says, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.cli import main
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.report import DataFacts, Report, Run, TargetFacts, write_report
from drafttrain.evaluation.tune_report import (
    CostFacts,
    PolicyResult,
    Replayed,
    TuneReport,
    write_tune_report,
)
from drafttrain.export_command import read_measured
from tests.export.pairs import SAMPLING, noisy_copy, save_drafter, save_head


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return save_drafter(tmp_path / "drafter")


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """What `drafttrain eval` writes, of one method."""
    run = Run(
        name="causal head(0.7) greedy",
        kind="method",
        drafter="causal",
        stop="head(0.7)",
        verifier="greedy",
        sampling={"temperature": 0.0},
        lossless=True,
        settings={},
        metrics={"speedup": Estimate(1.5, 1.4, 1.6)},
    )
    written = Report(
        mode="decode",
        target=TargetFacts(path="org/big", parameters=10, dtype="float32", device="cpu"),
        data=DataFacts(path="test.jsonl", prompts=200, references=0),
        environment=describe_environment("drafttrain eval --drafter tiny"),
        options={},
        runs=[run],
    )
    write_report(written, tmp_path / "report.json")
    return tmp_path / "report.json"


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["export", *map(str, arguments)])
    return int(stopped.value.code)


def test_a_drafter_with_head_and_report_is_exported(capsys, tmp_path, drafter, report):
    head = save_head(tmp_path / "head", noisy_copy("llama"))
    out = tmp_path / "out"
    given = ("--drafter", drafter, "--head", head, "--h", "0.4", "--report", report, "--out", out)
    assert run(*given) == 0
    said = capsys.readouterr().out
    assert "reloaded in a fresh process, every part equal to the original" in said
    assert "h = 0.4" in said
    card = (out / "README.md").read_text()
    assert "| causal head(0.7) greedy | 1.50× (1.40–1.60×) |" in card
    assert "drafttrain eval --drafter tiny" in card
    assert "200 prompts of `test.jsonl`" in card
    assert "speculative decoding of `org/tiny-target`" in card
    assert run(*given) == 2
    assert "add --force" in capsys.readouterr().err
    assert run(*given, "--force") == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "out"], "setting 'drafter' is missing"),
        (["--drafter", "{drafter}"], "setting 'out' is missing"),
        (["--drafter", "./nowhere", "--out", "out"], "no such folder"),
        (["--drafter", "{drafter}", "--out", "my-eagle3"], "choose another name"),
        (["--drafter", "{drafter}", "--out", "out", "--h", "1.5"], "h = '1.5': Input"),
        (["--drafter", "{drafter}", "--out", "out", "--head", "none"], "no acceptance head"),
        (["--drafter", "{drafter}", "--out", "out", "--report", "no.json"], "no such file"),
        (["--drafter", "{drafter}", "--out", "out", "--report", "{text}"], "is no JSON"),
        (["--drafter", "{drafter}", "--out", "{text}"], "is no earlier export"),
        (["--drafter", "{drafter}", "--out", "out", "forse=1"], "did you mean 'force'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_ends_in_one_line_and_writes_nothing(
    capsys, tmp_path, monkeypatch, drafter, arguments, says
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("not json")
    places = {"drafter": drafter, "text": tmp_path / "text"}
    before = sorted(tmp_path.rglob("*"))
    assert run(*[argument.format(**places) for argument in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if line.startswith("drafttrain:")]) == 1
    assert says in lines[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_reports_numbers_keep_their_source(report):
    measured = read_measured(report)
    assert measured.command == "drafttrain eval --drafter tiny"
    assert "threads" in measured.machine and "torch" in measured.machine


def policy(name: str, kind: str, value: float, gain: float, head: str | None = None):
    metrics = {
        "tokens_per_second": Estimate(100.0 + gain, 90.0, 120.0),
        "gain": Estimate(gain, gain - 0.01, gain + 0.01),
        "discard_rate": Estimate(0.2, 0.1, 0.3),
    }
    return PolicyResult(name=name, kind=kind, value=value, head=head, metrics=metrics, totals={})


def test_a_tuning_report_shows_policies_costs_and_verdict(tmp_path):
    replayed = Replayed(
        data=DataFacts(path="val.jsonl", prompts=50, references=0),
        tokens=1000,
        replicates=4,
        policies=[
            policy("k=4", "fixed", 4, 0.0),
            policy("D1-w6 h=0.7", "head", 0.7, 0.08, "D1-w6"),
            policy("oracle", "oracle", 0, 0.3),
        ],
    )
    costs = {field: 0.5 for field in CostFacts.model_fields}
    report = TuneReport(
        target=TargetFacts(path="org/big", parameters=10, dtype="float32", device="cpu"),
        drafter="tiny",
        heads="run",
        sampling=SAMPLING,
        max_new_tokens=64,
        max_draft=20,
        costs=CostFacts(**(costs | {"lengths": [2, 4], "prompts": 20, "runs": 40})),
        head_facts=[],
        calibration_prompts=50,
        calibration_length=4,
        best="D1-w6 h=0.7",
        best_fixed="k=4",
        best_head="D1-w6 h=0.7",
        chosen_on=replayed,
        reported_on=None,
        environment=describe_environment("drafttrain tune --heads run"),
    )
    write_tune_report(report, tmp_path / "tune.json")
    measured = read_measured(tmp_path / "tune.json")
    assert "| D1-w6 h=0.7 | 20.0 (10.0–30.0) |" in measured.table
    assert any("on which it was also chosen" in note for note in measured.notes)
    assert any(note.startswith("t_draft 500.00 ms") for note in measured.notes)
    assert measured.command == "drafttrain tune --heads run"
