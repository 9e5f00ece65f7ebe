"""Text and plots of `opt_tree.py`: E(A), tree size, delta and temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafttrain.data.shards.writing import write_file
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.plots import COLOURS, GREY, as_png, draw_legend, error_lengths, tidy

from expectation import Expectation
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """Results of one method at one value of the figure's parameter."""

    figure: int
    method: str
    value: float
    """Tree tokens, delta, or temperature."""
    mean_acceptance_length: Estimate
    tokens_per_second: Estimate
    speedup: float
    """Over interleaved plain decoding at the same temperature."""
    expected_accepted: Estimate | None
    passes_per_round: float


def summary(expectation: Expectation, mu: float, points: Sequence[Point]) -> Iterator[str]:
    """Yields the figures' numbers as lines of text."""
    pearson, correlation = expectation.correlation, "–"
    if pearson is not None:
        correlation = f"{pearson.value:.3f} ({pearson.low:.3f}–{pearson.high:.3f})"
    yield (
        f"figure 4: {expectation.rounds} rounds, mean E(A) {expectation.expected:.2f}, accepted "
        f"{expectation.accepted.value:.2f}, correlation {correlation}"
    )
    for one in expectation.bins:
        yield f"  E(A) {one.expected:5.2f}  accepted {shown(one.accepted)}  {one.rounds} rounds"
    yield f"mu = {mu:.2f}"
    for point in points:
        yield (
            f"figure {point.figure}: {point.method:9} {point.value:5g}  mean acceptance length "
            f"{shown(point.mean_acceptance_length)}  tok/s {point.tokens_per_second.value:6.1f}  "
            f"speedup {point.speedup:.2f}  drafter calls {point.passes_per_round:.2f}"
        )


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f}–{estimate.high:.2f})"


def draw(
    expectation: Expectation, mu: float, points: Sequence[Point], title: str, path: Path
) -> None:
    """Draws a PNG of four panels, like OPT-Tree's Figures 4 to 7."""
    figure = Figure(figsize=(12.4, 8.6), dpi=150, layout="constrained")
    axes = figure.subplots(2, 2)
    draw_expectation(axes[0, 0], expectation)
    draw_sizes(axes[0, 1], [point for point in points if point.figure == 5])
    axes[1, 0].set(title="Least gain of a level", xlabel="δ")
    draw_two(axes[1, 0], [point for point in points if point.figure == 6])
    axes[1, 0].axvline(mu, color=GREY, linewidth=1.2, linestyle="--", zorder=1)
    axes[1, 0].annotate(
        f"μ = t_draft / t_target = {mu:.2f}", (mu, 0.02), xycoords=("data", "axes fraction"),
        xytext=(4, 0), textcoords="offset points", fontsize=8.5, color="#555555",
    )  # fmt: skip
    axes[1, 1].set(title="Temperature of the target", xlabel="temperature")
    draw_two(axes[1, 1], [point for point in points if point.figure == 7])
    figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
    write_file(path, as_png(figure))


def draw_expectation(axis: Axes, expectation: Expectation) -> None:
    """Draws mean accepted tokens of rounds of similar E(A), and the diagonal."""
    bins = expectation.bins
    axis.errorbar(
        [one.expected for one in bins], [one.accepted.value for one in bins],
        yerr=error_lengths([one.accepted for one in bins]), fmt="o", color=COLOURS[0], capsize=3,
        label="rounds of similar E(A)",
    )  # fmt: skip
    most = max(max(one.expected, one.accepted.high) for one in bins)
    axis.plot([0, most], [0, most], ":", color=GREY, label="as expected")
    pearson = expectation.correlation
    note = "" if pearson is None else f", correlation {pearson.value:.2f} over rounds"
    axis.set(
        title="Expected and accepted tokens", xlabel=f"E(A){note}", ylabel="accepted tokens",
    )  # fmt: skip
    draw_legend(axis)
    tidy(axis)


def draw_sizes(axis: Axes, points: Sequence[Point]) -> None:
    """Draws mean acceptance length by tree tokens, one line per kind of tree."""
    kinds = list(dict.fromkeys(point.method for point in points))
    for colour, marker, kind in zip(COLOURS, "osD^v", kinds, strict=False):
        same = [point for point in points if point.method == kind]
        draw_curve(
            axis, same, [point.mean_acceptance_length for point in same], colour, f"{marker}-", kind
        )
    axis.set(title="Tree size", xlabel="tree tokens", ylabel="mean acceptance length")
    draw_legend(axis)
    tidy(axis)


def draw_two(axis: Axes, points: Sequence[Point]) -> None:
    """Draws mean acceptance length (left axis) and tokens per second (right axis)."""
    tokens, speeds = COLOURS[0], COLOURS[1]
    draw_curve(
        axis,
        points,
        [point.mean_acceptance_length for point in points],
        tokens,
        "o-",
        "mean acceptance length",
    )
    axis.set_ylabel("mean acceptance length (solid)", color=tokens)
    tidy(axis)
    other = axis.twinx()
    draw_curve(other, points, [point.tokens_per_second for point in points], speeds, "s--", "tok/s")
    other.set_ylabel("tokens per second (dashed)", color=speeds)
    other.spines[["top"]].set_visible(False)
    for one in (axis, other):
        one.set_ylim(bottom=0.0)


def draw_curve(
    axis: Axes,
    points: Sequence[Point],
    estimates: Sequence[Estimate],
    colour: str,
    line: str,
    label: str,
) -> None:
    axis.errorbar(
        [point.value for point in points], [estimate.value for estimate in estimates],
        yerr=error_lengths(estimates), fmt=line, color=colour, label=label, capsize=2,
        elinewidth=0.8, linewidth=1.6, markersize=5,
    )  # fmt: skip
