"""The plot of a report; its x axis shows what the report varied.

Speedup against batch size (SpecDec, Figure 5), quality (the trade-off of lossy verifiers) or draft
tokens per round (lengths, stop policies, trees); in teacher-forced mode acceptance against the
position in the draft. A line joins runs of one method that differ in one setting. A report of
`tune` has Figure 4 of SpecDec++ and a reliability diagram of the heads.
"""

import re
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafttrain.build.drafts import shortened
from drafttrain.config.base import counted
from drafttrain.config.command_line import hide_folders
from drafttrain.config.methods import STOPS
from drafttrain.config.sweep import SWEEPABLE
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.report import Report, Run, Search
from drafttrain.evaluation.tables import heading

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#B8A800")
"""Okabe and Ito's palette for colour-blind readers, and two more colours."""
GREY = "#9A9A9A"
MARKERS = "osD^vP*X"
QUALITY = {
    "bleu_difference": "BLEU, difference to plain decoding",
    "consistency_bleu": "BLEU against plain decoding",
}
"""Quality metrics for the x axis; the first one that a report has is used."""
SPEEDUP = "speedup over plain decoding"
CLOSE = 0.03
"""Distance of reference lines below which they share a label."""
NOTE = {"textcoords": "offset points", "fontsize": 9, "color": "#444444"}
"""How points are labelled."""


def error_lengths(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Returns error bar lengths below and above; 0 if the bootstrap interval misses the value."""
    below = [max(0.0, one.value - one.low) for one in estimates]
    return [below, [max(0.0, one.high - one.value) for one in estimates]]


def style(index: int) -> dict[str, str]:
    """Returns a curve's colour and marker, both of which tell it from its neighbours."""
    marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker}


def draw_head(axis: Axes, title: str, columns: int) -> None:
    """Draws title and legend above the axes, where they cover no point."""
    axis.legend(
        title=title, title_fontproperties={"size": 12, "weight": "bold"}, alignment="left",
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, fontsize=10, frameon=False,
    )  # fmt: skip


class Curve(NamedTuple):
    """The points of one method, joined in the order of x."""

    label: str
    xs: Sequence[float | Estimate]
    ys: Sequence[Estimate]
    notes: Sequence[str] = ()
    """A label for each point."""
    filled: bool = True
    """Whether markers are filled; those of lossy methods are not."""


class Plot(NamedTuple):
    """Curves, reference lines and axis labels of a plot."""

    title: str
    xlabel: str
    ylabel: str
    curves: list[Curve]
    levels: dict[str, float] = {}
    """Horizontal lines by name."""
    ticks: Sequence[float] = ()
    """Ticks of the x axis."""
    logarithmic: bool = False
    """Whether its scale is logarithmic."""


def plot_report(report: Report) -> bytes:
    """Draws the report's plot and returns it as PNG."""
    figure, search = Figure(figsize=(9, 6), dpi=150, layout="constrained"), report.search
    if search is None:
        draw_curves(figure.subplots(), choose_plot(report))
    elif search.heads:
        figure.set_figheight(11)
        above, below = figure.subplots(2)
        rates_panel(above, search)
        reliability_panel(below, search)
    else:
        rates_panel(figure.subplots(), search)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#EBEBEB", linewidth=0.8)
        axis.set_axisbelow(True)
    lines_below = (fill(hide_folders(line), 130) for line in heading(report))
    figure.supxlabel("\n".join(lines_below), fontsize=8, color="#666666")
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def choose_plot(report: Report) -> Plot:
    """Chooses the x axis by what the report varied."""
    alone = [run for run in report.runs if run.batch_size == 1]
    methods = [run for run in alone if run.kind == "method"]
    if report.mode == "teacher-forced":
        return _by_position(methods)
    if sizes := report.batch_sizes[1:]:
        names = dict.fromkeys(run.name for run in report.runs if run.kind != "plain")
        groups = [(name, [run for run in report.runs if run.name == name]) for name in names]
        curves = _curves(groups, lambda run: run.batch_size)
        labels = "Speed by batch size", "batch size", f"{SPEEDUP} at the same size"
        return Plot(*labels, curves, {"plain": 1.0}, [1, *sizes], logarithmic=True)
    levels = {run.name: run.metrics["speedup"].value for run in alone if run.kind != "method"}
    known = [name for name in QUALITY if any(name in run.metrics for run in methods)]
    if known and any(run.lossy for run in methods):
        measured = [run for run in methods if known[0] in run.metrics]
        curves = _curves(lines(measured), lambda run: run.metrics[known[0]])
        return Plot("Quality and speed", QUALITY[known[0]], SPEEDUP, curves, levels)
    curves = _curves(
        lines(methods), lambda run: run.totals["drafted"] / (run.totals["rounds"] or 1)
    )
    return Plot("Speed by draft length", "draft tokens per round", SPEEDUP, curves, levels)


def _curves(
    groups: Sequence[tuple[str, list[Run]]], x: Callable[[Run], float | Estimate]
) -> list[Curve]:
    """Returns the speedups of each group of runs; notes show the settings that vary in it."""
    curves = []
    for label, line in groups:
        speedups, lossy = [run.metrics["speedup"] for run in line], line[0].lossy
        names = [n for n in SWEEPABLE if len({run.settings.get(n) for run in line}) > 1]
        varied = ([(n, run.settings[n]) for n in names if n in run.settings] for run in line)
        notes = [" ".join(f"{name}={value:g}" for name, value in pairs) for pairs in varied]
        label += " (lossy)" if lossy else ""
        curves.append(Curve(label, [x(run) for run in line], speedups, notes, not lossy))
    return curves


def _by_position(methods: Sequence[Run]) -> Plot:
    """Returns the plot of acceptance by position; of methods that differ only in draft length it
    shows the longest, because shorter drafts are its prefixes."""
    curves = []
    for label, line in lines(methods):
        run = max(line, key=lambda run: run.sizes.get("depth", run.settings.get("k", 0)))
        rates = run.acceptance_rate_per_position
        known = enumerate([] if rates is None else rates.conditional, start=1)
        points = {position: rate for position, rate in known if rate is not None}
        curves.append(Curve(label, list(points), list(points.values())))
    ticks = range(1, 1 + max([1, *(x for curve in curves for x in curve.xs)]))
    title, ylabel = "Acceptance by position", "acceptance rate if all earlier tokens are accepted"
    return Plot(title, "position in the draft", ylabel, curves, ticks=ticks)


def lines(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Groups runs that differ in one setting, or in tree size, and sorts each group by it. Labels
    name what a group has in common; methods of `others` have the user's names. If beta and tau
    vary, each beta has its own line."""
    groups: dict[tuple[str | None, str], list[tuple[float, Run]]] = {}
    for run in runs:
        varied = [name for name in SWEEPABLE if name in run.settings]
        chain = run.method in ("chain", "cascade")
        last = varied[-1] if varied and chain else "nodes"  # trees vary in size, whatever their k
        stop = (run.stop or "").partition("(")[0].partition("=")[0]
        drafter = (run.called or str(run.drafter)).partition(" ")[0]
        words = [drafter, "" if run.method == "chain" else run.method]
        words += ["" if stop == "k" else stop, (run.verifier or "").partition("(")[0]]
        same = [name for name in varied if name != last and (name != "k" or chain)]
        words += [f"{name}={run.settings[name]:g}" for name in same]
        label = run.other or " ".join(filter(None, words))
        value = run.settings.get(last, run.sizes.get("nodes", 0))
        groups.setdefault((run.other, label), []).append((value, run))
    labels = shortened([label for _, label in groups], 48)
    return [
        (label, [run for _, run in sorted(line, key=lambda one: one[0])])
        for label, line in zip(labels, groups.values(), strict=True)
    ]


def draw_curves(axis: Axes, plot: Plot) -> None:
    """Draws each curve as points with intervals, joined by a line."""
    for index, curve in enumerate(plot.curves):
        look = style(index)
        xs = [x.value if isinstance(x, Estimate) else x for x in curve.xs]
        ys = [y.value for y in curve.ys]
        spread = [x for x in curve.xs if isinstance(x, Estimate)]
        axis.errorbar(
            xs, ys, xerr=error_lengths(spread) if spread else None, yerr=error_lengths(curve.ys),
            linestyle="-" if len(xs) > 1 else "none", linewidth=2, elinewidth=1, capsize=3,
            markersize=8, markerfacecolor=look["color"] if curve.filled else "white",
            label=curve.label, **look,
        )  # fmt: skip
        for x, y, note in zip(xs, ys, curve.notes, strict=False):
            axis.annotate(note, (x, y), xytext=(7, 6), **NOTE)
    labels: list[tuple[str, float]] = []
    for name, level in sorted(plot.levels.items(), key=lambda one: one[1]):
        axis.axhline(level, color=GREY, linewidth=1, linestyle=":", zorder=1)
        if labels and level - labels[-1][1] < CLOSE:
            name = f"{labels.pop()[0]}, {name}"
        labels.append((name, level))
    for name, level in labels:
        axis.annotate(
            name, (0.995, level), xycoords=("axes fraction", "data"), textcoords="offset points",
            xytext=(0, -2 if level < 1.0 else 2), va="top" if level < 1.0 else "bottom",
            ha="right", fontsize=7.5, color="#666666",
        )  # fmt: skip
    axis.set(xlabel=plot.xlabel, ylabel=plot.ylabel)
    if plot.ticks:
        if plot.logarithmic:
            axis.set_xscale("log", base=2)
        axis.set_xticks(list(plot.ticks), [f"{tick:g}" for tick in plot.ticks])
        axis.minorticks_off()
    axis.margins(0.08)
    draw_head(axis, plot.title, 1 + (len(plot.curves) > 3))


def rates_panel(axis: Axes, search: Search) -> None:
    """Draws discard rate against verification rate of chains (SpecDec++ Figure 4), and the oracle.

    Uses the first rung, in which every candidate decoded the same prompts. Points have the value of
    the setting that varies along their line.
    """
    rung = search.rungs[0]
    groups: dict[tuple[str, str], list[tuple[float, ...]]] = {}  # k=2 and k=4 share a group
    for name, settings in search.candidates.items():
        if not {"tree", "cascade"} & settings.keys():
            one, stop = rung.candidates[name], settings.get("stop") or {}
            kind = STOPS[stop.get("kind", "fixed")]
            group = groups.setdefault((re.sub(r"[=(][\d.]+\)?", "", name), kind.name), [])
            group.append((stop.get(kind.varied, 0), one.verification_rate, one.discard_rate))
    for index, ((group, _), points) in enumerate(groups.items()):
        values, calls, discarded = zip(*sorted(points), strict=True)  # in the order of the setting
        axis.plot(calls, discarded, linewidth=1.5, markersize=7, label=group, **style(index))
        for value, *point in zip(values, calls, discarded, strict=True):
            axis.annotate(f"{value:g}", point, xytext=(5, 4), **NOTE)
    if search.oracle is not None:
        rate = search.oracle.target_calls / search.oracle.tokens
        axis.plot(rate, 0.0, "k*", markersize=13, clip_on=False, label="oracle")
    axis.set(xlabel="target calls per token", ylabel="discarded tokens per token")
    axis.set_ylim(bottom=0.0)
    draw_head(axis, f"Cost of drafts, first {counted(rung.prompts, 'prompt')}", 4)


def reliability_panel(axis: Axes, search: Search) -> None:
    """Draws observed against predicted acceptance of the heads that were tried; point area shows
    positions."""
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    stops = [settings.get("stop") or {} for settings in search.candidates.values()]
    tried = {Path(stop["head"]).name for stop in stops if stop.get("head")}
    for index, head in enumerate(head for head in search.heads if head.name in tried):
        look, bins = style(index), head.reliability
        sizes = [8 + 70 * count / max(bins.positions) for count in bins.positions]
        axis.plot(bins.predicted, bins.observed, "-", color=look["color"], linewidth=1.2)
        axis.scatter(bins.predicted, bins.observed, s=sizes, label=head.name, clip_on=False, **look)
    axis.set(xlabel="predicted acceptance", ylabel="acceptance", xlim=(0, 1), ylim=(0, 1))
    draw_head(axis, "Reliability of acceptance heads", 4)
