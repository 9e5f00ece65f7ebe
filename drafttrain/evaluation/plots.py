"""The picture of a report: acceptance by position, speed, the trade-off of lossy methods; trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafttrain.evaluation.batches.plots import batch_panel
from drafttrain.evaluation.batches.tables import batch_sizes
from drafttrain.evaluation.plot_style import (
    COLOURS,
    GREY,
    draw_bars,
    draw_legend,
    draw_level,
    error_lengths,
    save_figure,
    tidy,
)
from drafttrain.evaluation.report import Report, Run
from drafttrain.evaluation.trade_off import quality_of, rule_of, trade_off_panel
from drafttrain.evaluation.trees.comparison import tree_groups
from drafttrain.evaluation.trees.plots import tree_length, tree_mbsu, tree_speed
from drafttrain.evaluation.tune_page import rates_panel, reliability_panel, speed_panel

MOST_LINES = len(COLOURS)
"""Methods drawn by position; more would not be told apart."""
MOST_BANDS = 2
"""Methods up to which intervals are drawn by position; more would hide each other."""
FEWEST_ROUNDS = 10
"""Rounds that must have reached a position for it to be drawn."""
FEWEST_INPUTS = 20
"""Inputs from which on the speed-ups of single ones are drawn."""

Panel = Callable[[Axes, Report], None]


def plot_report(report: Report, path: Path) -> None:
    """Write a PNG with the panels that the report has numbers for."""
    panels = choose_panels(report)
    columns = len(panels) if len(panels) < 4 else -(-len(panels) // 2)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.8 * columns, 4.4 * lines), dpi=150, layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, panel in zip(axes, panels, strict=False):
        panel(axis, report)
        tidy(axis)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(
        f"{Path(report.target.path).name} on {Path(report.data.path).name}, "
        f"{report.data.prompts} inputs",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    save_figure(figure, path)


def choose_panels(report: Report) -> list[Panel]:
    """What batch size 1 shows, and latency against throughput where others were measured."""
    if report.search is not None:
        heads = [reliability_panel] if report.search.heads else []
        return [speed_panel, rates_panel, *heads]
    panels = _panels_alone(report)
    return [*panels, batch_panel] if batch_sizes(report) else panels


def _panels_alone(report: Report) -> list[Panel]:
    """Acceptance where something was drafted; curves over k, or bars; the lossy trade-off.

    Trees: mean acceptance length, MBSU and speed over depths or budgets; bars where there is one.
    """
    runs = _methods(report)
    groups = tree_groups(report)
    if len(groups) > 1:
        return [tree_length, tree_mbsu, tree_speed]
    if groups:
        return [length_bars, speed_bars]
    panels: list[Panel] = []
    if any(run.acceptance_rate_per_position for run in runs):
        panels.append(acceptance_panel)
    timed = any("speedup" in run.metrics for run in runs)
    if len({run.settings.get("k") for run in runs if "k" in run.settings}) > 1:
        panels.append(length_against_k)
        if timed:
            panels.append(speed_against_k)
    elif timed or not runs:
        panels.append(speed_bars)
    elif len(runs) > 1:
        panels.append(length_bars)
    if report.data.prompts >= FEWEST_INPUTS and fastest_methods(report):
        panels.append(distribution_panel)
    if sum(run.lossy for run in runs) > 0 and quality_of(report) is not None:
        panels.append(trade_off_panel)
    return panels or [length_bars]


def acceptance_panel(axis: Axes, report: Report) -> None:
    """Conditional acceptance by draft position (solid), and accepted up to there (dashed)."""
    runs = longest_drafts(report)[:MOST_LINES]
    for colour, run in zip(COLOURS, runs, strict=False):
        rates = run.acceptance_rate_per_position
        points = [
            (i + 1, rate)
            for i, (rate, reached) in enumerate(zip(rates.conditional, rates.reached, strict=True))
            if rate is not None and reached >= FEWEST_ROUNDS
        ]
        xs = [x for x, _ in points]
        axis.plot(
            xs, [rate.value for _, rate in points], "o-", color=colour, markersize=4.5,
            label=_label(run), markerfacecolor="white" if run.lossy else colour,
        )  # fmt: skip
        if len(runs) <= MOST_BANDS:
            lows, highs = [rate.low for _, rate in points], [rate.high for _, rate in points]
            axis.fill_between(xs, lows, highs, color=colour, alpha=0.12, linewidth=0)
        upto = [rate.value for rate in rates.acceptance]
        axis.plot(range(1, len(upto) + 1), upto, "--", color=colour, linewidth=1, alpha=0.8)
    axis.plot([], [], "--", color=GREY, linewidth=1, label="of all rounds, accepted up to there")
    axis.set(
        title="Acceptance by draft position", xlabel="position in the draft",
        ylabel="share of rounds that got there", ylim=(0, 1.02),
    )  # fmt: skip
    axis.xaxis.get_major_locator().set_params(integer=True)
    draw_legend(axis)


def length_against_k(axis: Axes, report: Report) -> None:
    """Mean acceptance length against draft length, a line for each drafter and verifier."""
    _curves_over_k(axis, report, "mean_acceptance_length")
    axis.set(
        title="Mean acceptance length", xlabel="draft length k", ylabel="tokens per target call"
    )
    axis.set_ylim(bottom=1.0)
    draw_legend(axis)


def speed_against_k(axis: Axes, report: Report) -> None:
    """Speed-up against draft length, a line for each drafter and verifier."""
    _curves_over_k(axis, report, "speedup")
    for run in report.runs:
        if run.kind != "method" and "speedup" in run.metrics:
            value = run.metrics["speedup"].value
            draw_level(axis, value, run.name, below=value < 1.0)
    axis.set(title="Speed-up", xlabel="draft length k", ylabel="times plain decoding")
    axis.set_ylim(bottom=0.0)
    draw_legend(axis)


def speed_bars(axis: Axes, report: Report) -> None:
    """Speed-up over plain decoding, a bar for each run."""
    runs = [run for run in report.runs if "speedup" in run.metrics]
    _bars(axis, runs, "speedup", "×")
    axis.axvline(1.0, color=GREY, linewidth=1)
    axis.set(title="Speed-up", xlabel="times plain decoding in the same engine")


def length_bars(axis: Axes, report: Report) -> None:
    """Mean acceptance length, a bar for each run."""
    _bars(axis, [run for run in report.runs if "mean_acceptance_length" in run.metrics],
          "mean_acceptance_length", "")  # fmt: skip
    axis.set(title="Mean acceptance length", xlabel="tokens per target call")


def distribution_panel(axis: Axes, report: Report) -> None:
    """How many inputs are at least so many times faster, for the fastest of each verifier."""
    runs = fastest_methods(report)[:MOST_LINES]
    for colour, run in zip(COLOURS, runs, strict=False):
        values = run.speedup_quantiles["speedup"]
        shares = [1.0 - place / (len(values) - 1) for place in range(len(values))]
        axis.plot(values, shares, "--" if run.lossy else "-", color=colour, label=_label(run))
    axis.axvline(1.0, color=GREY, linewidth=1)
    axis.set(
        title="Speed-up of single inputs", xlabel="at least so many times plain decoding",
        ylabel="share of inputs", ylim=(0, 1.02),
    )  # fmt: skip
    axis.set_xlim(left=0)
    draw_legend(axis)


def _curves_over_k(axis: Axes, report: Report, metric: str) -> None:
    runs = [run for run in _methods(report) if "k" in run.settings and metric in run.metrics]
    lines: dict[tuple[str | None, ...], list[Run]] = {}
    for run in runs:
        key = (run.other or run.drafter, run.method, run.verifier)
        lines.setdefault(key, []).append(run)
    several = len({drafter for drafter, *_ in lines}) > 1
    for colour, (drafter, _, verifier), points in zip(COLOURS, lines, lines.values(), strict=False):
        points.sort(key=lambda run: run.settings["k"])
        lossy = points[0].lossy
        name = f"{drafter} {verifier}" if several else verifier
        axis.errorbar(
            [run.settings["k"] for run in points],
            [run.metrics[metric].value for run in points],
            yerr=error_lengths([run.metrics[metric] for run in points]),
            fmt="o-", color=colour, capsize=3, linewidth=1.6, markersize=5,
            markerfacecolor="white" if lossy else colour,
            label=f"{name} (lossy)" if lossy else name,
        )  # fmt: skip
    axis.set_xticks(sorted({run.settings["k"] for run in runs}))


def _bars(axis: Axes, runs: Sequence[Run], metric: str, suffix: str) -> None:
    estimates = [run.metrics[metric] for run in runs]
    colours = [COLOURS[0] if run.kind == "method" else "#C4C4C4" for run in runs]
    bars = draw_bars(axis, [_two_lines(run) for run in runs], estimates, colours)
    for bar, run in zip(bars, runs, strict=True):
        if run.lossy:
            bar.set(facecolor="white", edgecolor=COLOURS[0], hatch="///")
    for place, estimate in enumerate(estimates):
        axis.annotate(
            f"{estimate.value:.2f}{suffix}", (estimate.high, place), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axis.margins(x=0.14)
    axis.set_xlim(left=0)


def _methods(report: Report) -> list[Run]:
    return [run for run in report.runs if run.kind == "method"]


def longest_drafts(report: Report) -> list[Run]:
    """The methods that drafted, each drafter and verifier with its longest draft only.

    Shorter drafts have the same conditional acceptance, up to randomness.
    """
    runs = [run for run in _methods(report) if run.acceptance_rate_per_position]
    return _most_of_each(
        runs,
        lambda run: (run.other, run.drafter, run.verifier),
        lambda run: len(run.acceptance_rate_per_position.drafted),
    )


def fastest_methods(report: Report) -> list[Run]:
    """Of each drafter and kind of verifier, the run with the highest speed-up."""
    runs = [run for run in _methods(report) if "speedup" in run.speedup_quantiles]
    return _most_of_each(
        runs,
        lambda run: (run.other, run.drafter, rule_of(run)),
        lambda run: run.metrics["speedup"].value,
    )


def _most_of_each(
    runs: Sequence[Run], kind: Callable[[Run], object], value: Callable[[Run], float]
) -> list[Run]:
    """Of each kind the run with the highest value, the first on ties."""
    kinds = dict.fromkeys(map(kind, runs))
    return [max((run for run in runs if kind(run) == one), key=value) for one in kinds]


def _label(run: Run) -> str:
    return f"{run.name} (lossy)" if run.lossy else run.name


def _two_lines(run: Run) -> str:
    """The label with the verifier on a line of its own."""
    if run.kind != "method" or run.verifier is None:
        return run.name
    first = run.name.removesuffix(run.verifier).rstrip()
    return f"{first}\n{_label(run)[len(first) + 1 :]}"
