"""Pictures of a tuning report: the trade-off of Figure 4, gains, and reliability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.plot_style import (
    COLOURS,
    GREY,
    draw_bars,
    draw_legend,
    error_lengths,
    save_figure,
    tidy,
)
from drafttrain.evaluation.stops.report import PolicyResult, Replayed, TuneReport
from drafttrain.evaluation.stops.tables import best_policy, main_policies

MOST_HEADS = 4
"""Heads drawn in colour, the best on the choosing prompts; the others are grey."""


Panel = Callable[[Axes], None]


def plot_tune(report: TuneReport, path: Path) -> None:
    """Write a PNG: discard rate against verification rate, gains, reliability, costs."""
    panels = all_panels(report)
    figure = Figure(figsize=(5.8 * len(panels), 4.8), dpi=150, layout="constrained")
    for panel, axis in zip(
        panels, figure.subplots(1, len(panels), squeeze=False).flat, strict=True
    ):
        panel(axis)
        tidy(axis)
    save_figure(figure, path)


def all_panels(report: TuneReport) -> list[Panel]:
    """What there is to draw, each on an axis of its own."""
    splits = [replayed for replayed in (report.chosen_on, report.reported_on) if replayed]
    panels = [partial(pareto_panel, report=report, replayed=replayed) for replayed in splits]
    panels.append(partial(gain_panel, report=report))
    if report.head_facts:
        panels.append(partial(reliability_panel, report=report))
    if report.costs.rounds:
        panels.append(partial(cost_panel, report=report))
    return panels


def cost_panel(axis: Axes, report: TuneReport) -> None:
    """What drafting and judging so many tokens take, at every batch size."""
    tokens = np.arange(1, max(report.costs.lengths) + 1)
    for colour, costs in zip(COLOURS, report.costs.rounds, strict=False):
        name = f"batch {costs.batch_size}"
        judging, drafting = costs.target.at(tokens + 1), costs.draft.at(tokens)
        axis.plot(tokens, 1000 * judging, "-", color=colour, label=f"judging, {name}")
        axis.plot(tokens, 1000 * drafting, "--", color=colour, label=f"drafting, {name}")
    axis.set(title="What a round costs", xlabel="drafted tokens", ylabel="ms a round of a sequence")
    axis.set_ylim(bottom=0.0)
    draw_legend(axis)


def pareto_panel(axis: Axes, report: TuneReport, replayed: Replayed) -> None:
    """SpecDec++ Figure 4: a line a head over h, fixed lengths, entropy, under the best chain's
    rule; trees, cascades and the oracle."""
    chain = replayed.find(report.best_chain or report.best)
    best, policies = best_heads(report), replayed.under(chain.verifier)
    for head in sorted({policy.head for policy in policies if policy.head}):
        if head not in best:
            _line(axis, _of_head(policies, head), "#DDDDDD", None, marker="", intervals=False)
    for colour, head in zip(COLOURS, best, strict=False):
        _line(axis, _of_head(policies, head), colour, head)
    fixed = [policy for policy in policies if policy.kind == "fixed"]
    _line(axis, fixed, "black", "fixed length", marker="s")
    for policy in fixed:
        x, y = _point(policy)
        axis.annotate(
            f"{policy.value:g}", (x.value, y.value), xytext=(5, 4), textcoords="offset points",
            fontsize=7.5,
        )  # fmt: skip
    entropy = [policy for policy in policies if policy.kind == "entropy"]
    _line(axis, entropy, GREY, "entropy", marker="^")
    for colour, marker, kind in ((COLOURS[4], "D", "tree"), (COLOURS[5], "P", "cascade")):
        for place, one in enumerate(p for p in replayed.policies if p.kind == kind):
            x, y = _point(one)
            label = f"{kind}s" if place == 0 else None
            axis.plot(x.value, y.value, marker, color=colour, markersize=6, label=label)
    x, y = _point(replayed.find("oracle"))
    axis.plot(x.value, y.value, "*", color="#B8A800", markersize=13, label="oracle")
    _iso_time(axis, report, replayed)
    title = "chosen on" if replayed is report.chosen_on else "reported on"
    axis.set(
        title=f"{title}: {Path(replayed.data.path).name}, {replayed.data.prompts} prompts",
        xlabel="target calls per token", ylabel="discarded tokens per token",
    )  # fmt: skip
    axis.set_ylim(bottom=0.0)
    draw_legend(axis)


def gain_panel(axis: Axes, report: TuneReport) -> None:
    """Modelled throughput against the best fixed length, with intervals."""
    policies = main_policies(report)
    gains = [policy.metrics["gain"] for policy in policies]
    colours = ["#C4C4C4" if p.kind in ("fixed", "oracle") else COLOURS[0] for p in policies]
    draw_bars(axis, [policy.name for policy in policies], gains, colours, scale=100.0)
    axis.axvline(0.0, color=GREY, linewidth=1)
    name = Path(report.reported.data.path).name
    axis.set(
        title=f"Modelled throughput, {name}",
        xlabel=f"% over {report.best_fixed} (best fixed length)",
    )


def reliability_panel(axis: Axes, report: TuneReport) -> None:
    """What heads predict against what comes, on drafts that decoding made."""
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for colour, name in zip(COLOURS, best_heads(report), strict=False):
        head = report.head(name)
        bins = head.reliability
        most = max(bins.positions)
        axis.plot(bins.predicted, bins.observed, "-", color=colour, linewidth=1.4)
        axis.scatter(
            bins.predicted, bins.observed, s=[8 + 70 * count / most for count in bins.positions],
            color=colour, label=f"{name}, ECE {head.all_positions['ece'].value:.3f}",
        )  # fmt: skip
    axis.set(
        title="Reliability on drafted positions", xlabel="predicted acceptance",
        ylabel="acceptance", xlim=(0, 1), ylim=(0, 1),
    )  # fmt: skip
    draw_legend(axis, place="upper left")


def best_heads(report: TuneReport) -> list[str]:
    """The heads drawn in colour, best first by the choosing prompts."""
    names = [head.name for head in report.head_facts]

    def speed(name: str) -> float:
        return best_policy(report.chosen_on, name).metrics["tokens_per_second"].value

    return sorted(names, key=speed, reverse=True)[:MOST_HEADS]


def _of_head(policies: Sequence[PolicyResult], head: str) -> list[PolicyResult]:
    own = [policy for policy in policies if policy.head == head]
    return sorted(own, key=lambda policy: policy.value)


def _line(
    axis: Axes,
    policies: Sequence[PolicyResult],
    colour: str,
    label: str | None,
    marker: str = "o",
    intervals: bool = True,
) -> None:
    points = [_point(policy) for policy in policies]
    if not points:
        return
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axis.errorbar(
        [x.value for x in xs], [y.value for y in ys], fmt=f"{marker}-", color=colour, label=label,
        xerr=error_lengths(xs) if intervals else None,
        yerr=error_lengths(ys) if intervals else None,
        linewidth=1.4, markersize=4.5, elinewidth=0.7, zorder=2 if label else 1,
    )  # fmt: skip


def _iso_time(axis: Axes, report: TuneReport, replayed: Replayed) -> None:
    """Along these lines time is the same (Eq. 2.3): through the best fixed length and policy."""
    costs = report.costs
    if costs.t_target <= costs.t_draft:
        return
    slope = -(costs.t_target - costs.t_draft) / costs.t_draft
    low, high = axis.get_xlim()
    bounds = axis.get_ylim()
    for name in {report.best_fixed, report.best}:
        x, y = _point(replayed.find(name))
        ends = [y.value + slope * (end - x.value) for end in (low, high)]
        axis.plot([low, high], ends, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    axis.set_xlim(low, high)
    axis.set_ylim(bounds)


def _point(policy: PolicyResult) -> tuple[Estimate, Estimate]:
    return policy.metrics["verification_rate"], policy.metrics["discard_rate"]
