"""What all pictures share: colours, intervals, reference lines, and writing the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from drafttrain.data.shards.writing import renamed_when_whole
from drafttrain.evaluation.bootstrap import Estimate

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#B8A800")
"""Okabe and Ito's palette, which colour-blind readers can tell apart, and two more."""
GREY = "#9A9A9A"


def error_lengths(estimates: Sequence[Estimate], scale: float = 1.0) -> list[list[float]]:
    """Distances below and above; never negative, as a resampled interval may miss the value."""
    below = [scale * max(0.0, one.value - one.low) for one in estimates]
    above = [scale * max(0.0, one.high - one.value) for one in estimates]
    return [below, above]


def draw_level(axis: Axes, value: float, label: str, below: bool = False) -> None:
    """A horizontal line with its name at the right end, above or below it."""
    axis.axhline(value, color=GREY, linewidth=1, linestyle=":", zorder=1)
    axis.annotate(
        label, (0.995, value), xycoords=("axes fraction", "data"), xytext=(0, -2 if below else 2),
        textcoords="offset points", ha="right", va="top" if below else "bottom",
        fontsize=7.5, color="#666666",
    )  # fmt: skip


def draw_legend(axis: Axes, columns: int = 1, place: str = "best") -> None:
    axis.legend(
        fontsize=8, frameon=True, framealpha=0.85, edgecolor="none", loc=place, ncols=columns
    )


def draw_bars(
    axis: Axes,
    names: Sequence[str],
    estimates: Sequence[Estimate],
    colours: Sequence[str],
    scale: float = 1.0,
) -> BarContainer:
    """A bar to the right for each name, the first one on top."""
    bars = axis.barh(
        range(len(names)), [scale * one.value for one in estimates], color=colours, height=0.62,
        xerr=error_lengths(estimates, scale),
        error_kw={"ecolor": "#444444", "elinewidth": 1, "capsize": 3},
    )  # fmt: skip
    axis.set_yticks(range(len(names)), names)
    axis.tick_params(axis="y", labelsize=8)
    axis.invert_yaxis()
    return bars


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#EBEBEB", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.title.set(fontsize=11, fontweight="bold")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG, and the folders above it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with renamed_when_whole(path) as temporary:
        figure.savefig(temporary, format="png")
