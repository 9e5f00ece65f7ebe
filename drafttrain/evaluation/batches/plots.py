"""Latency against throughput, a curve for each method through its batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from drafttrain.evaluation.plot_style import COLOURS, draw_legend, error_lengths
from drafttrain.evaluation.report import Report, Run

MOST_CURVES = len(COLOURS)
"""Curves that can be told apart."""
MARKS = {"plain": "s", "method": "o", "baseline": "D"}


def batched_runs(report: Report) -> list[Run]:
    """The runs to draw: plain decoding, then those that are fastest at some batch size."""
    runs = [run for run in report.runs if run.batches]
    others = sorted(
        (run for run in runs if run.kind != "plain"),
        key=lambda run: -max(result.metrics["speedup"].value for result in run.batches),
    )
    kept = [run for run in runs if run.kind == "plain"] + others
    names = {run.name for run in kept[:MOST_CURVES]}
    return [run for run in runs if run.name in names]


def batch_panel(axis: Axes, report: Report) -> None:
    """Latency against throughput (SpecDec, Figure 5): to the right and further down is better."""
    for colour, run in zip(COLOURS, batched_runs(report), strict=False):
        speeds = [result.metrics["tokens_per_second"] for result in run.batches]
        delays = [result.metrics["ms_per_token"] for result in run.batches]
        xs, ys = [one.value for one in speeds], [one.value for one in delays]
        axis.errorbar(
            xs, ys, xerr=error_lengths(speeds), yerr=error_lengths(delays),
            fmt=f"{MARKS[run.kind]}{'-' if run.kind == 'method' else '--'}", color=colour,
            ecolor="#DADADA", elinewidth=1, linewidth=1.6, markersize=4.5,
            markerfacecolor="white" if run.lossy else colour,
            label=f"{run.name} (lossy)" if run.lossy else run.name,
        )  # fmt: skip
        _number(axis, xs, ys, [result.batch_size for result in run.batches])
    axis.set(
        title="Latency and throughput by batch size",
        xlabel="tokens a second, all sequences together", ylabel="ms a token of one sequence",
        xscale="log", yscale="log",
    )  # fmt: skip
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        scale.set_major_formatter(ScalarFormatter())
        scale.set_minor_formatter(NullFormatter())
    axis.margins(0.12)
    draw_legend(axis)


def _number(axis: Axes, xs: Sequence[float], ys: Sequence[float], sizes: Sequence[int]) -> None:
    """Write the batch size at every point."""
    for x, y, size in zip(xs, ys, sizes, strict=True):
        axis.annotate(
            str(size), (x, y), textcoords="offset points", xytext=(5, -9), fontsize=7.5,
            color="#444444",
        )  # fmt: skip
