"""The pictures of reports with figures written by hand."""

from __future__ import annotations

from matplotlib.figure import Figure

from drafttrain.evaluation.plots import length_against_k
from tests.evaluation.batches.reports import batched_report, run


def test_each_drafter_has_a_line_of_its_own_over_draft_lengths():
    lengths = [("causal", 2), ("causal", 4), ("max-gram", 6)]
    runs = [run(f"{drafter} k={k} greedy", [], k=k, drafter=drafter) for drafter, k in lengths]
    axis = Figure().subplots()
    length_against_k(axis, batched_report().model_copy(update={"runs": runs}))
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["causal greedy", "max-gram greedy"]
    drawn = [list(line.get_xdata()) for line in axis.get_lines()]
    assert [2, 4] in drawn and [6] in drawn and [2, 4, 6] not in drawn
