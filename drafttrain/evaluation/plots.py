"""The picture of a report: acceptance by position, speed, and the trade-off of lossy methods."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.report import Report, Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#B8A800")
"""Okabe and Ito's palette, which colour-blind readers can tell apart, and two more."""
GREY = "#9A9A9A"
MOST_LINES = len(COLOURS)
"""Methods drawn by position; more would not be told apart."""

Panel = Callable[[Axes, Report], None]


def plot_report(report: Report, path: Path) -> None:
    """Write a PNG with the panels that the report has numbers for."""
    panels = choose_panels(report)
    figure = Figure(figsize=(5.6 * len(panels), 4.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis, report)
        _tidy(axis)
    figure.suptitle(
        f"{Path(report.target.path).name} on {Path(report.data.path).name}, "
        f"{report.data.prompts} inputs",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def choose_panels(report: Report) -> list[Panel]:
    """Acceptance where something was drafted; curves over k, or bars; the lossy trade-off."""
    runs = _methods(report)
    panels: list[Panel] = []
    if any(run.by_position for run in runs):
        panels.append(acceptance_panel)
    timed = any("speedup" in run.metrics for run in runs)
    if len({run.settings.get("k") for run in runs if "k" in run.settings}) > 1:
        panels.append(tokens_against_k)
        if timed:
            panels.append(speed_against_k)
    elif timed or not runs:
        panels.append(speed_bars)
    if sum(run.lossy for run in runs) > 0 and _quality(report) is not None:
        panels.append(trade_off_panel)
    return panels or [tokens_bars]


def acceptance_panel(axis: Axes, report: Report) -> None:
    """Conditional acceptance by draft position (solid), and accepted up to there (dashed)."""
    runs = [run for run in _methods(report) if run.by_position][:MOST_LINES]
    for colour, run in zip(COLOURS, runs, strict=False):
        rates = run.by_position
        assert rates is not None, "chosen above"
        known = [(i + 1, rate) for i, rate in enumerate(rates.conditional) if rate is not None]
        xs = [x for x, _ in known]
        axis.plot(
            xs, [rate.value for _, rate in known], "o-", color=colour, markersize=4,
            label=_label(run), markerfacecolor="white" if run.lossy else colour,
        )  # fmt: skip
        if len(runs) <= 3:
            lows, highs = [rate.low for _, rate in known], [rate.high for _, rate in known]
            axis.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
            upto = [rate.value for rate in rates.acceptance]
            axis.plot(range(1, len(upto) + 1), upto, "--", color=colour, linewidth=1)
    axis.set(title="Acceptance by draft position", xlabel="position in the draft", ylim=(0, 1.02))
    axis.set_ylabel(
        "of rounds that got there (– – of all rounds)"
        if len(runs) <= 3
        else "of rounds that got there"
    )
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=7.5, frameon=False, loc="lower left")


def tokens_against_k(axis: Axes, report: Report) -> None:
    """Tokens a round against draft length, a line for each verifier."""
    _curves_over_k(axis, report, "tokens_per_round")
    axis.set(title="Tokens per round", xlabel="draft length k", ylabel="tokens per target call")


def speed_against_k(axis: Axes, report: Report) -> None:
    """Speed-up against draft length, a line for each verifier."""
    _curves_over_k(axis, report, "speedup")
    axis.axhline(1.0, color=GREY, linewidth=1)
    for run in report.runs:
        if run.kind == "baseline" and "speedup" in run.metrics:
            value = run.metrics["speedup"].value
            axis.axhline(value, color=GREY, linewidth=1, linestyle=":")
            axis.annotate(
                run.name, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                fontsize=7.5, color="#666666",
            )  # fmt: skip
    axis.set(title="Speed-up", xlabel="draft length k", ylabel="times plain decoding")


def speed_bars(axis: Axes, report: Report) -> None:
    """Speed-up over plain decoding, a bar for each run."""
    runs = [run for run in report.runs if "speedup" in run.metrics]
    _bars(axis, runs, "speedup", "×")
    axis.axvline(1.0, color=GREY, linewidth=1)
    axis.set(title="Speed-up", xlabel="times plain decoding in the same engine")


def tokens_bars(axis: Axes, report: Report) -> None:
    """Tokens a round, a bar for each run."""
    _bars(axis, [run for run in report.runs if "tokens_per_round" in run.metrics],
          "tokens_per_round", "")  # fmt: skip
    axis.set(title="Tokens per round", xlabel="tokens per target call")


def trade_off_panel(axis: Axes, report: Report) -> None:
    """Quality against tokens a round; hollow points are lossy."""
    metric = _quality(report)
    assert metric is not None, "chosen above"
    runs = [run for run in _methods(report) if metric in run.metrics]
    plain = report.runs[0].metrics.get(metric)
    if plain is not None:
        axis.axhline(plain.value, color=GREY, linewidth=1)
        axis.annotate("plain decoding", (1, plain.value), xycoords=("axes fraction", "data"),
                      ha="right", va="bottom", fontsize=7.5, color="#666666")  # fmt: skip
    families = sorted({run.verifier.partition("(")[0] for run in runs if run.verifier})
    for colour, family in zip(COLOURS, families, strict=False):
        points = [run for run in runs if run.verifier and run.verifier.startswith(family)]
        for run in points:
            x, y = run.metrics["tokens_per_round"], run.metrics[metric]
            axis.errorbar(
                x.value, y.value, xerr=_error(x), yerr=_error(y), fmt="o", color=colour,
                ecolor="#D0D0D0", elinewidth=1, markerfacecolor="white" if run.lossy else colour,
            )  # fmt: skip
            axis.annotate(_point_label(run), (x.value, y.value), xytext=(5, 5),
                          textcoords="offset points", fontsize=7.5)  # fmt: skip
        label = f"{family} (lossy)" if points[0].lossy else family
        axis.plot([], [], "o", color=colour, label=label,
                  markerfacecolor="white" if points[0].lossy else colour)  # fmt: skip
    names = {"bleu": "BLEU", "consistency_bleu": "BLEU against plain decoding"}
    axis.margins(x=0.15, y=0.15)
    axis.set(title="Quality and speed", xlabel="tokens per target call", ylabel=names[metric])
    axis.legend(fontsize=7.5, frameon=False, loc="lower left")


def _curves_over_k(axis: Axes, report: Report, metric: str) -> None:
    runs = [run for run in _methods(report) if "k" in run.settings and metric in run.metrics]
    verifiers = list(dict.fromkeys(run.verifier for run in runs))
    for colour, verifier in zip(COLOURS, verifiers, strict=False):
        points = sorted(
            (run for run in runs if run.verifier == verifier), key=lambda run: run.settings["k"]
        )
        lossy = points[0].lossy
        axis.errorbar(
            [run.settings["k"] for run in points],
            [run.metrics[metric].value for run in points],
            yerr=_errors([run.metrics[metric] for run in points]),
            fmt="o-", color=colour, capsize=3, linewidth=1.6, markersize=5,
            markerfacecolor="white" if lossy else colour,
            label=f"{verifier} (lossy)" if lossy else verifier,
        )  # fmt: skip
    axis.set_xticks(sorted({run.settings["k"] for run in runs}))
    axis.legend(fontsize=7.5, frameon=False, loc="best")


def _bars(axis: Axes, runs: Sequence[Run], metric: str, suffix: str) -> None:
    estimates = [run.metrics[metric] for run in runs]
    colours = [COLOURS[0] if run.kind == "method" else "#C4C4C4" for run in runs]
    bars = axis.barh(
        range(len(runs)), [e.value for e in estimates], xerr=_errors(estimates), color=colours,
        error_kw={"ecolor": "#444444", "elinewidth": 1, "capsize": 3}, height=0.62,
    )  # fmt: skip
    for bar, run in zip(bars, runs, strict=True):
        if run.lossy:
            bar.set(facecolor="white", edgecolor=COLOURS[0], hatch="///")
    for place, estimate in enumerate(estimates):
        axis.annotate(
            f"{estimate.value:.2f}{suffix}", (estimate.high, place), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axis.set_yticks(range(len(runs)), [_label(run).replace(" ", "\n", 1) for run in runs])
    axis.tick_params(axis="y", labelsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.14)
    axis.set_xlim(left=0)


def _methods(report: Report) -> list[Run]:
    return [run for run in report.runs if run.kind == "method"]


def _quality(report: Report) -> str | None:
    """The best quality metric that the methods have."""
    for metric in ("bleu", "consistency_bleu"):
        if any(metric in run.metrics for run in _methods(report)):
            return metric
    return None


def _label(run: Run) -> str:
    return f"{run.name} (lossy)" if run.lossy else run.name


def _point_label(run: Run) -> str:
    names = {"k": "k", "beta": "β", "tau": "τ"}
    return " ".join(
        f"{names[name]}={run.settings[name]:g}" for name in names if name in run.settings
    )


def _error(estimate: Estimate) -> list[list[float]]:
    return _errors([estimate])


def _errors(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Distances below and above; never negative, as a resampled interval may miss the value."""
    below = [max(0.0, estimate.value - estimate.low) for estimate in estimates]
    above = [max(0.0, estimate.high - estimate.value) for estimate in estimates]
    return [below, above]


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#EBEBEB", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.title.set(fontsize=11, fontweight="bold")
