"""Which runs of a report are trees to compare, by what, and which are the best of their method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.config.sweep import SWEEPABLE
from drafttrain.evaluation.report import Report, Run, TreeAxis

OTHER: dict[TreeAxis, TreeAxis] = {"depth": "nodes", "nodes": "depth"}
PATH_RULES = {"k-seq": "spectr", "multi-round": "specinfer"}
"""Verifier of independent paths -> the method's name in the papers."""


@dataclass(frozen=True)
class TreeGroup:
    """The runs of one depth or budget, method by method in the report's order."""

    value: float
    runs: list[Run]

    def rivals(self, run: Run) -> list[Run]:
        """The trees of the run's method, itself among them."""
        return [other for other in self.runs if method_of(other) == method_of(run)]

    def best(self, run: Run, metric: str) -> bool:
        """Whether no other tree of the run's method here has more of the metric."""
        found = [other.metrics[metric] for other in self.rivals(run) if metric in other.metrics]
        return metric in run.metrics and run.metrics[metric].value >= max(e.value for e in found)


def tree_runs(report: Report) -> list[Run]:
    """The methods whose drafts have a depth and a number of nodes, chains among them."""
    return [run for run in report.runs if run.kind == "method" and run.settings.keys() >= {*OTHER}]


def compared_by(report: Report) -> TreeAxis | None:
    """What trees were compared at; None where the report compares none.

    Where the report does not say and no setting was swept, it is whichever of depth and nodes has
    fewer different values.
    """
    runs = tree_runs(report)
    if report.compared_by is not None or len(runs) < 2:
        return report.compared_by
    if any(name in run.settings for run in runs for name in SWEEPABLE):
        return None
    depths, nodes = ({run.settings[axis] for run in runs} for axis in ("depth", "nodes"))
    return "depth" if len(depths) <= len(nodes) else "nodes"


def tree_groups(report: Report) -> list[TreeGroup]:
    """Every depth or budget with its runs; none where the report compares no trees."""
    axis, runs = compared_by(report), tree_runs(report)
    if axis is None:
        return []
    methods = methods_of(runs)
    values = sorted({run.settings[axis] for run in runs})
    return [
        TreeGroup(
            value,
            sorted(
                (run for run in runs if run.settings[axis] == value),
                key=lambda run: methods.index(method_of(run)),
            ),
        )
        for value in values
    ]


def methods_of(runs: Sequence[Run]) -> list[str]:
    """The methods, in order of appearance."""
    return list(dict.fromkeys(method_of(run) for run in runs))


def method_of(run: Run) -> str:
    """The method without the sizes of its trees: sd, spectr, rsd-c, opt-tree, opt-tree,head."""
    shape = _shape(run)
    if "(" not in shape:
        return "sd"
    kind = re.sub(r"\([^)]*\)", "", shape).split("+")[0]
    if kind == "paths" and run.verifier is not None:
        return PATH_RULES.get(run.verifier, kind)
    return f"{kind},head" if ",head)" in shape else kind


def tree_name(run: Run) -> str:
    """The method with the sizes of its trees: sd, spectr(3), rsd-c(2,2), opt-tree(25)."""
    method, sizes = method_of(run), re.findall(r"\(([^)]*)\)", _shape(run))
    return f"{method.removesuffix(',head')}({'+'.join(sizes)})" if sizes else method


def _shape(run: Run) -> str:
    """The last word of the drafter's name: `spec-drafter rsd-s(3)` has its drafter first."""
    return (run.drafter or "").split(" ")[-1]
