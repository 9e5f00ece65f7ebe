"""The frontier of lossy rules, of figures written by hand."""

from __future__ import annotations

import pytest
from drafttrain.evaluation.trade_off import frontiers, quality_of, rule_of, trade_off_panel
from matplotlib.figure import Figure

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.plots import choose_panels
from drafttrain.evaluation.report import Report, Run
from drafttrain.evaluation.tables import markdown_trade_off
from tests.evaluation.batches.reports import batched_report, run


def point(verifier: str, length: float, agreement: float, **settings) -> Run:
    numbers = {"mean_acceptance_length": length, "target_agreement": agreement}
    metrics = {name: Estimate(value, value, value) for name, value in numbers.items()}
    found = run(verifier, [], k=5, verifier=verifier, lossless=verifier == "greedy")
    return found.model_copy(update={"metrics": metrics, "settings": {"k": 5, **settings}})


def swept() -> Report:
    """Out of order, as nobody promises the order of a sweep."""
    runs = [
        point("greedy", 2.0, 1.0),
        point("spec-verification(3,2.0)", 3.0, 0.8, beta=3.0, tau=2.0),
        point("spec-verification(3,1.0)", 2.5, 0.9, beta=3.0, tau=1.0),
        point("spec-verification(5,1.0)", 2.6, 0.85, beta=5.0, tau=1.0),
    ]
    return batched_report().model_copy(update={"runs": runs})


def test_a_frontier_joins_what_differs_in_the_last_setting_of_a_rule_in_its_order():
    lines = [[one.verifier for one in line] for line in frontiers(swept().runs)]
    assert lines == [
        ["spec-verification(3,1.0)", "spec-verification(3,2.0)"],
        ["spec-verification(5,1.0)"],
    ]


def test_numbers_do_not_make_another_rule():
    assert list(dict.fromkeys(map(rule_of, swept().runs))) == ["greedy", "spec-verification"]


def test_the_panel_has_agreement_where_there_are_no_texts_to_compare():
    report = swept()
    assert quality_of(report) == "target_agreement"
    assert trade_off_panel in choose_panels(report)
    axis = Figure().subplots()
    trade_off_panel(axis, report)
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]
    assert ([2.5, 3.0], [0.9, 0.8]) in lines
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["greedy", "spec-verification (lossy)"]
    assert {"τ=1", "τ=2"} <= {text.get_text()[-3:] for text in axis.texts}


@pytest.mark.parametrize(
    "cells",
    [
        "| 5 | strict | – | 2.00 | 100.0 |",
        "| 5 | 3 | 2 | 3.00 | 80.0 |",
    ],
)
def test_the_table_has_the_settings_of_each_rule(cells):
    assert cells in markdown_trade_off(swept(), intervals=False).splitlines()
