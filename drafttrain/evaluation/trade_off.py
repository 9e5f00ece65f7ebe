"""What lossy verification costs and gains: quality, or agreement with the target, against speed.

Whatever setting of a lossy rule is swept, its runs make a line, the rule's frontier.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from drafttrain.config.sweep import SWEEPABLE
from drafttrain.config.verifiers import RULES
from drafttrain.evaluation.plot_style import COLOURS, draw_legend, draw_level, error_lengths
from drafttrain.evaluation.report import Report, Run
from drafttrain.evaluation.tables import shown

QUALITY = {
    "bleu_difference": "BLEU, difference to plain decoding",
    "consistency_bleu": "BLEU against plain decoding",
    "target_agreement": "share of tokens that the target agrees with",
}
"""Quality metrics of the trade-off panel, best first."""


def trade_off_panel(axis: Axes, report: Report) -> None:
    """What lossy acceptance costs and gains; hollow points are lossy."""
    metric = quality_of(report)
    runs = [run for run in _methods(report) if metric in run.metrics]
    if metric == "bleu_difference":
        draw_level(axis, 0.0, "plain decoding")
    rules = dict.fromkeys(rule_of(run) for run in runs)
    for colour, rule in zip(COLOURS, rules, strict=False):
        points = [run for run in runs if rule_of(run) == rule]
        lossy = points[0].lossy
        face = "white" if lossy else colour
        for place, run in enumerate(points):
            x, y = run.metrics["mean_acceptance_length"], run.metrics[metric]
            axis.errorbar(
                x.value, y.value, xerr=error_lengths([x]), yerr=error_lengths([y]), fmt="o",
                color=colour, ecolor="#DADADA", elinewidth=1, markerfacecolor=face,
            )  # fmt: skip
            axis.annotate(
                _point_label(run, points), (x.value, y.value), textcoords="offset points",
                xytext=(6, 5 if place % 2 == 0 else -11), fontsize=7.5,
            )  # fmt: skip
        label = f"{rule} (lossy)" if lossy else rule
        for line in frontiers(points):
            xs = [run.metrics["mean_acceptance_length"].value for run in line]
            axis.plot(xs, [run.metrics[metric].value for run in line], color=colour, linewidth=1)
        axis.plot([], [], "o", color=colour, label=label, markerfacecolor=face)
    axis.margins(x=0.15, y=0.15)
    axis.set(title="Quality and speed", xlabel="tokens per target call", ylabel=QUALITY[metric])
    draw_legend(axis)


def quality_of(report: Report) -> str | None:
    """The best quality metric that the methods have."""
    for metric in QUALITY:
        if any(metric in run.metrics for run in _methods(report)):
            return metric
    return None


def frontiers(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in the last setting of their rule alone, in its order: beta and tau make a
    line for each beta."""
    lines: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        rule = RULES.get((run.verifier or "").partition("(")[0])
        if rule is not None and rule.settings:
            last = rule.settings[-1].name
            others = tuple((name, value) for name, value in run.settings.items() if name != last)
            lines.setdefault((run.drafter, run.method, last, others), []).append(run)
    return [
        sorted(line, key=lambda run: run.settings[last]) for (_, _, last, _), line in lines.items()
    ]


def rule_of(run: Run) -> str:
    """The verification rule, whatever its numbers."""
    return (run.verifier or "").partition("(")[0]


def _point_label(run: Run, beside: Sequence[Run]) -> str:
    """The settings in which a point differs from those beside it."""
    names = {name: name for name in SWEEPABLE} | {"beta": "β", "tau": "τ"}
    varied = [n for n in names if len({other.settings.get(n) for other in beside}) > 1]
    return " ".join(f"{names[n]}={shown(run.settings[n])}" for n in varied if n in run.settings)


def _methods(report: Report) -> list[Run]:
    return [run for run in report.runs if run.kind == "method"]
