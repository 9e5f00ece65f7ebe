"""The plot of a report: one message, with an x axis for what was varied.

Speedup against batch size (SpecDec, Figure 5), quality (the trade-off of lossy rules) or draft
tokens per round (lengths, stop policies, trees); teacher-forced acceptance against the position in
the draft. A line joins points of one method that differ in one setting; every point is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafttrain.config.sweep import SWEEPABLE
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.plot_style import (
    COLOURS,
    GREY,
    draw_level,
    error_lengths,
    save_figure,
    tidy,
)
from drafttrain.evaluation.report import Report, Run
from drafttrain.evaluation.tune_report import draw_search

QUALITY = {
    "bleu_difference": "BLEU, difference to plain decoding",
    "consistency_bleu": "BLEU against plain decoding",
    "target_agreement": "share of tokens that the target agrees with",
}
"""Quality metrics of the trade-off, best first."""
MARKERS = "osD^vP*X"
SPEEDUP = "speedup over plain decoding"


@dataclass(frozen=True)
class Curve:
    """The points of one method, joined in the order of x."""

    label: str
    xs: Sequence[float | Estimate]
    ys: Sequence[Estimate]
    lossy: bool = False
    notes: Sequence[str] = ()
    """A word at each point."""


@dataclass(frozen=True)
class Plot:
    """What is drawn."""

    title: str
    xlabel: str
    ylabel: str
    curves: list[Curve]
    levels: dict[str, float] = field(default_factory=dict)
    """Horizontal lines by name."""
    ticks: Sequence[float] = ()
    """Of the x axis; logarithmic where they double."""


def plot_report(report: Report, path: Path) -> None:
    """Write the plot as a PNG."""
    if report.search is not None:
        figure = Figure(figsize=(13, 9), dpi=120, layout="constrained")
        draw_search(figure, report)
    else:
        plot = choose_plot(report)
        figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
        axis = figure.subplots()
        if all(len(curve.xs) == 1 and curve.xs[0] == 0.0 for curve in plot.curves):
            draw_bars(axis, plot)
        else:
            draw_curves(axis, plot)
        axis.set_title(plot.title, loc="left")
    for axis in figure.axes:
        tidy(axis)
        axis.title.set_fontsize(15)
    figure.supxlabel(footer(report), fontsize=9, color="#555555", x=0.01, ha="left")
    save_figure(figure, path)


def footer(report: Report) -> str:
    """Drafter, target, machine and date."""
    named = [run for run in report.runs if run.kind == "method"]
    drafters = ", ".join(dict.fromkeys(run.other or run.drafter or "" for run in named)) or "none"
    machine = report.environment.gpu if "cuda" in report.target.device else None
    machine = machine or f"{report.environment.cpu}, {report.environment.threads} threads"
    return (
        f"drafter: {drafters}; target: {Path(report.target.path).name} ({report.target.dtype}); "
        f"{report.data.prompts} prompts\n{machine}; {report.environment.date[:10]}"
    )


def choose_plot(report: Report) -> Plot:
    """The plot for what the report varied: batch size, quality, draft length; else bars."""
    methods = [run for run in report.runs if run.kind == "method"]
    if report.mode == "teacher-forced":
        return _by_position(methods)
    baselines = {
        run.name: run.metrics["speedup"].value for run in report.runs if run.kind != "method"
    }
    if any(run.batches for run in report.runs):
        return _by_batch_size(report)
    quality = next((name for name in QUALITY if any(name in r.metrics for r in methods)), None)
    if quality is not None and any(run.lossy for run in methods):
        curves = [
            Curve(
                label,
                [run.metrics[quality] for run in line],
                [run.metrics["speedup"] for run in line],
                line[0].lossy,
                _varied(line),
            )
            for label, line in lines([run for run in methods if quality in run.metrics])
        ]
        return Plot("Quality and speed", QUALITY[quality], SPEEDUP, curves, baselines)
    found = lines(methods)
    if any(len(line) > 1 for _, line in found):
        curves = [
            Curve(
                label,
                [draft_tokens(run) for run in line],
                [run.metrics["speedup"] for run in line],
                line[0].lossy,
                _varied(line),
            )
            for label, line in found
        ]
        return Plot("Speed by draft length", "draft tokens per round", SPEEDUP, curves, baselines)
    curves = [
        Curve(run.name, [0.0], [run.metrics["speedup"]], run.lossy)
        for run in report.runs
        if "speedup" in run.metrics
    ]
    return Plot("Speed", "", SPEEDUP, curves)


def lines(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs that differ in one setting, or in the size of their trees, in its order.

    Beta and tau make a line for each beta. The label has what a line's runs have in common.
    """
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        varied = [name for name in SWEEPABLE if name in run.settings]
        last = varied[-1] if varied else "nodes"
        if run.method not in ("chain", "cascade"):
            last = "nodes"  # of trees the size, whatever k says of their levels
        same = [(name, run.settings[name]) for name in varied if name not in (last, "k")]
        if last != "k" and last != "nodes" and "k" in run.settings:
            same.append(("k", run.settings["k"]))
        rule = (run.verifier or "").partition("(")[0]
        stop = (run.stop or "").partition("(")[0].partition("=")[0]
        key = (run.other or run.drafter, run.method, stop, rule, last, tuple(same))
        found.setdefault(key, []).append(run)
    labelled = []
    for (drafter, method, stop, rule, last, same), line in found.items():
        words = [str(drafter), *([] if method == "chain" else [str(method)])]
        words += [] if stop in ("k", "", last) else [str(stop)]
        words += [str(rule), *(f"{name}={value:g}" for name, value in same)]
        line.sort(key=lambda run: run.settings.get(last, run.sizes.get("nodes", 0)))
        labelled.append((" ".join(words), line))
    return labelled


def draft_tokens(run: Run) -> float:
    """Mean draft tokens per round, which every length, stop policy and tree has."""
    return run.totals["drafted"] / max(1, run.totals["rounds"])


def draw_curves(axis: Axes, plot: Plot) -> None:
    """Points with intervals, a line through those of each curve."""
    for place, curve in enumerate(plot.curves):
        colour = COLOURS[place % len(COLOURS)]
        marker = MARKERS[place // len(COLOURS) % len(MARKERS)]
        xs = [x.value if isinstance(x, Estimate) else x for x in curve.xs]
        ys = [y.value for y in curve.ys]
        spread = [x for x in curve.xs if isinstance(x, Estimate)]
        axis.errorbar(
            xs, ys, xerr=error_lengths(spread) if spread else None, yerr=error_lengths(curve.ys),
            fmt=f"{marker}-", color=colour, ecolor="#CFCFCF", elinewidth=1, linewidth=2,
            markersize=7, markerfacecolor="white" if curve.lossy else colour,
            label=f"{curve.label} (lossy)" if curve.lossy else curve.label,
        )  # fmt: skip
        for x, y, note in zip(xs, ys, curve.notes, strict=False):
            axis.annotate(
                note, (x, y), textcoords="offset points", xytext=(7, 6), fontsize=9, color="#444444"
            )
    for name, level in plot.levels.items():
        draw_level(axis, level, name, below=level < 1.0)
    axis.set_xlabel(plot.xlabel, fontsize=13)
    axis.set_ylabel(plot.ylabel, fontsize=13)
    axis.tick_params(labelsize=12)
    if plot.ticks:
        if len(plot.ticks) > 2 and plot.ticks[-1] >= 4 * plot.ticks[0]:
            axis.set_xscale("log", base=2)
        axis.set_xticks(list(plot.ticks), [f"{tick:g}" for tick in plot.ticks])
        axis.minorticks_off()
    axis.margins(0.08)
    columns = 1 + (len(plot.curves) > 6)
    axis.legend(fontsize=11, frameon=True, framealpha=0.85, edgecolor="none", ncols=columns)


def draw_bars(axis: Axes, plot: Plot) -> None:
    """A bar for each curve's only point, the first on top, the value at its end."""
    values = [curve.ys[0] for curve in plot.curves]
    names = [f"{curve.label} (lossy)" if curve.lossy else curve.label for curve in plot.curves]
    axis.barh(
        range(len(names)), [one.value for one in values], color=COLOURS[0], height=0.62,
        xerr=error_lengths(values), error_kw={"ecolor": "#444444", "elinewidth": 1, "capsize": 3},
    )  # fmt: skip
    for place, estimate in enumerate(values):
        axis.annotate(
            f"{estimate.value:.2f}", (estimate.high, place), xytext=(6, 0), fontsize=12,
            textcoords="offset points", va="center",
        )  # fmt: skip
    axis.axvline(1.0, color=GREY, linewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(plot.ylabel, fontsize=13)
    axis.tick_params(labelsize=12)
    axis.margins(x=0.14)
    axis.set_xlim(left=0)


def _by_position(methods: Sequence[Run]) -> Plot:
    """Of methods that differ in length alone the longest: shorter ones are its beginning."""
    curves = []
    for label, line in lines(methods):
        run = max(line, key=lambda run: run.sizes.get("depth", run.settings.get("k", 0)))
        rates = run.acceptance_rate_per_position
        known = [] if rates is None else list(enumerate(rates.conditional, start=1))
        points = [(place, rate) for place, rate in known if rate is not None]
        curves.append(Curve(label, [place for place, _ in points], [rate for _, rate in points]))
    deepest = max((max(curve.xs, default=1) for curve in curves), default=1)
    return Plot(
        "Acceptance by position in the draft",
        "position in the draft",
        "acceptance rate where all before were accepted",
        curves,
        ticks=range(1, int(deepest) + 1),
    )


def _by_batch_size(report: Report) -> Plot:
    """Every run through its batch sizes."""
    sizes = sorted({result.batch_size for run in report.runs for result in run.batches})
    curves = [
        Curve(
            run.name,
            [result.batch_size for result in run.batches],
            [result.metrics["speedup"] for result in run.batches],
            run.lossy,
        )
        for run in report.runs
        if run.kind != "plain" and run.batches
    ]
    title = "Speed by batch size"
    return Plot(title, "batch size", f"{SPEEDUP} at the same size", curves, {"plain": 1.0}, sizes)


def _varied(line: Sequence[Run]) -> list[str]:
    """The setting in which each run differs from the others of its line."""
    names = [n for n in SWEEPABLE if len({run.settings.get(n) for run in line}) > 1]
    return [
        " ".join(f"{n}={run.settings[n]:g}" for n in names if n in run.settings) for run in line
    ]
