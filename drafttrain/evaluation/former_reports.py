"""Reports of former versions, brought to the present names.

A run once had no method and no sizes: they stood in the name of its drafter (`rsd-s(3)`,
`opt-tree(25,head)`), in its stop policy (`k=5`, `gain(0.2,20)`) and, where trees were compared,
among its settings.
"""

from __future__ import annotations

import re
from typing import Any

RENAMED = {
    "tokens_per_round": "mean_acceptance_length",
    "by_position": "acceptance_rate_per_position",
}
"""Former field or metric -> the present one."""
WIDE = ("paths", "rsd-s")
"""Kinds of trees whose name holds their width."""


def with_present_names(values: Any) -> Any:
    """The JSON of a report, of any command, as the present version would have written it."""
    if isinstance(values, list):
        return [with_present_names(value) for value in values]
    if not isinstance(values, dict):
        return values
    found = {RENAMED.get(name, name): with_present_names(value) for name, value in values.items()}
    if "verifier" in found and "stop" in found and "method" not in found:
        return found | _method_and_sizes(found)
    return found


def _method_and_sizes(run: dict[str, Any]) -> dict[str, Any]:
    """Method, sizes and settings of a run that has its sizes in names."""
    if run["kind"] != "method":
        beams = re.fullmatch(r"generate beam (\d+)", run["name"])
        if beams is not None:
            return {"method": "beam", "sizes": {"beams": int(beams[1])}}
        return {"method": run["name"], "sizes": {}}
    settings, stop = dict(run["settings"]), run["stop"] or ""
    sizes: dict[str, Any] = {
        name: int(settings.pop(name)) for name in ("depth", "nodes") if name in settings
    }
    fixed = re.fullmatch(r"k=(\d+)", stop)
    most = re.fullmatch(r"gain\([\d.e-]+,(\d+)\)", stop)
    if most is not None:
        sizes["max_draft"] = int(most[1])
    method, shape = "chain", (run["drafter"] or "").split(" ")[-1]  # a Spec-Drafter's comes first
    if (run["drafter"] or "").startswith("cascade "):
        method = "cascade"
        rows = re.search(r" ([\d,/]+)(?: l=|$)", run["drafter"])
        if rows is not None:
            sizes["increments"] = [list(map(int, row.split(","))) for row in rows[1].split("/")]
    elif (tree := re.match(r"([a-z-]+)\(([^)]*)\)", shape)) is not None:
        method, given = tree[1], tree[2].split(",")
        if method in WIDE:
            sizes["width"] = int(given[0])
            sizes |= {"drafters": shape.count("+") + 1} if "+" in shape else {}
        elif method == "rsd-c":
            sizes["branching"] = [int(count) for count in given]
        elif given[-1] == "head":
            method += ",head"
    if method in ("chain", "cascade") and fixed is not None:
        k = int(fixed[1])
        sizes = {"depth": k, "nodes": k} | sizes | {"k": k}
    return {"method": method, "sizes": sizes, "settings": settings}
