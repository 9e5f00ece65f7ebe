"""What all pictures share: colours, intervals, reference lines, and writing the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
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


def draw_legend(axis: Axes, columns: int = 1) -> None:
    axis.legend(
        fontsize=8, frameon=True, framealpha=0.85, edgecolor="none", loc="best", ncols=columns
    )


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
