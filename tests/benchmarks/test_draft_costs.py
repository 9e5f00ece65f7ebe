"""benchmarks/draft_costs.py on a kept report."""

import json

import pytest

from benchmarks import draft_costs
from drafttrain.evaluation.report import Report
from tests.test_budgets import ROOT

KEPT = ROOT / "benchmarks/results/heads-gsm8k-greedy.json"


def test_rates_are_those_of_the_report_and_are_drawn(tmp_path, monkeypatch):
    report = Report.model_validate_json(KEPT.read_text())
    found = draft_costs.rates(report)
    assert [*found][:3] == ["k=3", "k=4", "cumulative 0.2"]
    totals = {run["name"]: run["totals"] for run in json.loads(KEPT.read_text())["runs"]}
    for name, (calls, discarded) in [*found.items()][2:]:
        rounds, drafted, accepted = (totals[name][one] for one in ("rounds", "drafted", "accepted"))
        assert calls == pytest.approx(rounds / totals[name]["tokens"])
        assert discarded == pytest.approx((drafted - accepted) / totals[name]["tokens"])
    [axis] = draft_costs.draw([("pair", found, 0.18)]).axes
    assert [tuple(line.get_xydata()[0]) for line in axis.lines] == [*found.values(), (0.18, 0.0)]
    monkeypatch.setattr("sys.argv", ["draft_costs.py", str(KEPT), f"--figure={tmp_path / 'a.png'}"])
    draft_costs.main()
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_as_many_oracles_as_reports_are_wanted(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["draft_costs.py", str(KEPT), "--oracle=0.18,0.58"])
    with pytest.raises(SystemExit):
        draft_costs.main()
    assert "give 1 each" in capsys.readouterr().err
