"""Draft trees over depth or budget: a line a method (RSD, Jeon et al. 2024, Figures 4 and 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.plot_style import COLOURS, draw_legend, draw_level, error_lengths
from drafttrain.evaluation.report import Report, TreeAxis
from drafttrain.evaluation.trees.comparison import (
    TreeGroup,
    compared_by,
    method_of,
    methods_of,
    tree_groups,
    tree_runs,
)

TITLES = {
    "mean_acceptance_length": "Mean acceptance length",
    "mbsu": "Memory-bound speed-up",
    "tokens_per_second": "Tokens per second",
}
AXES: dict[TreeAxis, str] = {
    "depth": "most levels of a draft",
    "nodes": "draft tokens a round",
}
MARKERS = "osD^vP*Xph"
APART = 0.012
"""Shift of neighbouring methods, a share of the axis, so that intervals do not hide each other."""


def tree_length(axis: Axes, report: Report) -> None:
    """Mean acceptance length (block efficiency)."""
    draw_trees("mean_acceptance_length", axis, report)


def tree_mbsu(axis: Axes, report: Report) -> None:
    """Memory-bound speed-up."""
    draw_trees("mbsu", axis, report)


def tree_speed(axis: Axes, report: Report) -> None:
    """Tokens a second, plain decoding as a level."""
    draw_trees("tokens_per_second", axis, report)
    plain = report.runs[0]
    draw_level(axis, plain.metrics["tokens_per_second"].value, plain.name)


def draw_trees(metric: str, axis: Axes, report: Report) -> None:
    """A metric over depths or budgets: at each, the best of a method's trees by that metric."""
    compared = compared_by(report)
    groups = tree_groups(report)
    methods = methods_of(tree_runs(report))
    values = [group.value for group in groups]
    step = APART * (values[-1] - values[0])
    for place, method in enumerate(methods):
        points = list(best_of(groups, method, metric))
        colour = COLOURS[place % len(COLOURS)]
        shift = step * (place - (len(methods) - 1) / 2)
        axis.errorbar(
            [value + shift for value, _ in points], [estimate.value for _, estimate in points],
            yerr=error_lengths([estimate for _, estimate in points]),
            fmt=MARKERS[place % len(MARKERS)] + "-", color=colour, label=method,
            capsize=2, elinewidth=0.8, linewidth=1.6, markersize=5,
        )  # fmt: skip
    axis.set_xticks(values)
    axis.set(title=TITLES[metric], xlabel=f"{AXES[compared]} (best tree of each method)")
    draw_legend(axis, columns=1 + len(methods) // 5)


def best_of(
    groups: Sequence[TreeGroup], method: str, metric: str
) -> Iterator[tuple[float, Estimate]]:
    """Depth or budget, and the method's best there; nothing where it was not measured."""
    for group in groups:
        found = [run.metrics.get(metric) for run in group.runs if method_of(run) == method]
        known = [estimate for estimate in found if estimate is not None]
        if known:
            yield group.value, max(known, key=lambda estimate: estimate.value)
