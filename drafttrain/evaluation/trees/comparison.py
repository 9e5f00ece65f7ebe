"""Which runs of a report are trees to compare, by what, and which are the best of their method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.evaluation.report import Report, Run, TreeAxis

CHAINS = ("chain", "cascade")
"""Methods whose drafts are trees of width one."""
OTHER: dict[TreeAxis, TreeAxis] = {"depth": "nodes", "nodes": "depth"}
PATH_RULES = {"k-seq": "spectr", "multi-round": "specinfer"}
"""Verifier of independent paths -> the method's name in the papers."""
SHOWN_SIZES = {"rsd-c": "branching", "paths": "width", "rsd-s": "width"}
"""The size that names a tree of a method; nodes of all others."""


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
    return [run for run in report.runs if run.kind == "method" and run.sizes.keys() >= {*OTHER}]


def compared_by(report: Report) -> TreeAxis | None:
    """What trees were compared at; None where the report compares none.

    Where the report does not say, it does if there are several runs, some of them of trees, and no
    two differ in a setting alone, as those of a sweep do. It is then whichever of depth and nodes
    has fewer different values.
    """
    runs = tree_runs(report)
    if report.compared_by is not None or len(runs) < 2:
        return report.compared_by
    if all(run.method in CHAINS for run in runs) or _swept(runs):
        return None
    depths, nodes = ({run.sizes[axis] for run in runs} for axis in ("depth", "nodes"))
    return "depth" if len(depths) <= len(nodes) else "nodes"


def _swept(runs: Sequence[Run]) -> bool:
    """Whether drafts of one method and size were measured under several settings."""
    drafts = [(run.method, str(run.sizes)) for run in runs]
    settings = [str(run.settings) for run in runs]
    return len(set(drafts)) < len(set(zip(drafts, settings, strict=True)))


def tree_groups(report: Report) -> list[TreeGroup]:
    """Every depth or budget with its runs; none where the report compares no trees."""
    axis, runs = compared_by(report), tree_runs(report)
    if axis is None:
        return []
    methods = methods_of(runs)
    values = sorted({size_of(run, axis) for run in runs})
    return [
        TreeGroup(
            value,
            sorted(
                (run for run in runs if size_of(run, axis) == value),
                key=lambda run: methods.index(method_of(run)),
            ),
        )
        for value in values
    ]


def size_of(run: Run, axis: TreeAxis) -> int:
    """Most levels, or most draft tokens, of a run's drafts."""
    return run.sizes[axis]


def methods_of(runs: Sequence[Run]) -> list[str]:
    """The methods, in order of appearance."""
    return list(dict.fromkeys(method_of(run) for run in runs))


def method_of(run: Run) -> str:
    """The method as papers call it: sd, spectr, rsd-c, opt-tree, opt-tree,head."""
    if run.method == "paths":
        return PATH_RULES.get(run.verifier or "", "paths")
    return "sd" if run.method == "chain" else run.method


def tree_name(run: Run) -> str:
    """The method with the sizes of its trees: sd, spectr(3), rsd-c(2,2), opt-tree(25,head)."""
    if run.method in CHAINS:
        return method_of(run)
    method, _, head = method_of(run).partition(",")
    size = run.sizes[SHOWN_SIZES.get(run.method, "nodes")]
    shown = ",".join(map(str, size)) if isinstance(size, list) else str(size)
    drafters = run.sizes.get("drafters", 1)
    return f"{method}({'+'.join([shown] * drafters)}{',head' if head else ''})"
