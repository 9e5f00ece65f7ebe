"""Tables and the picture of batch sizes, from reports with figures written by hand."""

from __future__ import annotations

import io
import json

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from drafttrain.evaluation.batches.plots import batch_panel, batched_runs
from drafttrain.evaluation.batches.tables import (
    batch_table,
    best_lengths,
    length_groups,
    lengths_table,
    markdown_batches,
    markdown_lengths,
)
from drafttrain.evaluation.plots import choose_panels, plot_report
from drafttrain.evaluation.report import Parity, Report, read_report, write_json
from drafttrain.evaluation.tables import parity_lines
from tests.evaluation.batches.reports import batched_report, result, run


@pytest.fixture
def report() -> Report:
    return batched_report()


def printed(table) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_a_report_with_batches_survives_a_round_trip(report, tmp_path):
    write_json(report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["runs"][0]["batches"][1]["differing"] == 2


def test_every_method_has_a_row_at_each_of_its_batch_sizes(report):
    lines = markdown_batches(report, intervals=False).splitlines()
    assert lines[0] == (
        "| method | batch | ms a token | tok/s | speed-up | other tokens | memory, MB |"
    )
    assert lines[2] == "| plain | 1 | 10.00 | 100 | 1.00× | – | 2.5 |"
    assert lines[3] == "| plain | 8 | 18.00 | 400 | 1.00× | 2 of 40 | 20.0 |"
    assert len(lines) == 2 + 7
    assert "1.20× (1.08–1.32×)" in markdown_batches(report)
    shown = printed(batch_table(report))
    assert shown.count("causal k=3 greedy") == 1 and "2 of 40" in shown and "coarse" in shown


def test_why_sequences_of_a_batch_differ_is_said_and_errors_stand_out(report):
    parts = [{"row": row, "position": 3, "gap": gap} for row, gap in enumerate((2e-7, 4e-2, 5e-2))]
    values = {"against": "batch size 1", "compared": 40, "bound": 1e-5}
    drawn = Parity(**values, identical=39, differences=parts[:1])
    wrong = Parity(**values, identical=37, differences=parts)

    def with_parity(parity: Parity) -> Report:
        differing = len(parity.differences)
        batches = [result(8, 400, 18, 1.0, differing).model_copy(update={"parity": parity})]
        return report.model_copy(update={"runs": [run("plain", batches)]})

    assert parity_lines(with_parity(drawn)) == [
        "plain, batch 8: 39 of 40 equal to batch size 1; at the first difference the top-2 "
        "logit gap is 2.0e-07 to 2.0e-07 (ties, bound 1e-05)"
    ]
    assert (
        "2.0e-07 to 5.0e-02 (2 are NOT ties: please report" in parity_lines(with_parity(wrong))[0]
    )
    assert "| 1 of 40 |" in markdown_batches(with_parity(drawn))
    assert "| 3 of 40, 2 NOT ties |" in markdown_batches(with_parity(wrong))


def test_the_draft_length_is_chosen_for_each_batch_size(report):
    [group] = length_groups(report)
    assert {size: best.k for size, best in best_lengths(group).items()} == {1: 9, 8: 3}
    assert markdown_lengths(report, intervals=False).splitlines() == [
        "| method | batch 1 | batch 8 |",
        "| --- | ---: | ---: |",
        "| causal greedy | 9: 2.10× | 3: 1.20× |",
    ]
    assert "9: 2.10×" in printed(lengths_table(report))


def test_where_no_length_pays_it_is_said(report):
    slow = [run("causal k=3 greedy", [result(8, 90, 30, 0.9)], k=3)]
    slow.append(run("causal k=5 greedy", [result(8, 80, 33, 0.8)], k=5))
    [group] = length_groups(report.model_copy(update={"runs": slow}))
    best = best_lengths(group)[8]
    assert best.k == 3 and not best.pays


def test_lengths_of_different_rules_are_not_mixed(report):
    lossy = {"settings": {"k": 9, "beta": 3.0, "tau": 1.0}, "verifier": "spec", "lossless": False}
    runs = [*report.runs[:2], run("lossy", report.runs[2].batches, k=9, **lossy)]
    assert length_groups(report.model_copy(update={"runs": runs})) == []


def test_a_curve_goes_through_the_batch_sizes_of_each_method(report):
    axis = Figure().subplots()
    batch_panel(axis, report)
    lines = [line for line in axis.get_lines() if len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in lines[:3]] == [[100, 400], [150, 480], [210, 380]]
    assert [list(line.get_ydata()) for line in lines[:3]] == [[10, 18], [6.5, 16], [5, 21]]
    assert [text.get_text() for text in axis.texts] == ["1", "8", "1", "8", "1", "8", "1"]


def test_the_picture_is_written_with_its_panel(report, tmp_path):
    assert choose_panels(report)[-1] is batch_panel
    plot_report(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_of_many_methods_plain_and_the_fastest_are_drawn(report):
    many = [run(f"m{k}", [result(1, 100, 10, 1 + k / 10)], k=k) for k in range(1, 12)]
    drawn = batched_runs(report.model_copy(update={"runs": [report.runs[0], *many]}))
    assert [one.name for one in drawn] == ["plain", *(f"m{k}" for k in range(5, 12))]
