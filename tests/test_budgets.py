"""The project's size in lines, files and settings is within the bounds of budgets.json.

`python -m tests.test_budgets --write` lowers the bounds of parts that have shrunk and never raises
one. If code has to grow, its bound is raised by hand, so that a reviewer sees it.
"""

import json
import sys
from math import ceil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_name("budgets.json")
GROWTH = 1.01
"""Bound set by `--write` relative to the size: small corrections should not need a new bound."""
LOOSE = 1.03
"""Maximal bound relative to the size, for bounds above the design's."""

Budget = dict[str, int]
"""`bound`: the maximal size now. `design`: the size that the part should shrink to."""


def read_budgets() -> dict[str, Budget]:
    return json.loads(BUDGETS.read_text(encoding="utf-8"))


def sizes() -> dict[str, int]:
    """Returns the lines of Python by package, and the other bounded sizes."""
    package = ROOT / "drafttrain"
    lines = {file: len(file.read_bytes().splitlines()) for file in package.rglob("*.py")}
    rooms = {folder.name: 0 for folder in package.iterdir() if (folder / "__init__.py").exists()}
    for file, count in lines.items():
        room = file.relative_to(package).parts[0]
        rooms[room if room in rooms else "commands"] += count
    found = {f"{room} lines": count for room, count in sorted(rooms.items())}
    found |= {"package lines": sum(lines.values()), "package files": len(lines)}
    found["largest file"] = max(lines.values())
    for folder in ("tests", "recipes", "benchmarks"):
        files = (ROOT / folder).rglob("*.py")
        found[f"{folder} lines"] = sum(len(file.read_bytes().splitlines()) for file in files)
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    return found | {"settings": sum(line.startswith("| `") for line in page.splitlines())}


def lowered(budgets: dict[str, Budget], found: dict[str, int]) -> dict[str, Budget]:
    """Returns bounds just above the sizes, never higher than before nor below the design."""
    return {
        name: budget
        | {"bound": min(budget["bound"], max(budget["design"], ceil(found[name] * GROWTH)))}
        for name, budget in budgets.items()
    }


def test_every_size_has_a_budget():
    assert sizes().keys() == read_budgets().keys()


@pytest.mark.parametrize("name", read_budgets())
def test_a_size_stays_within_its_budget_and_the_budget_close_to_it(name):
    size, budget = sizes()[name], read_budgets()[name]
    bound = budget["bound"]
    assert size <= bound, f"{name}: {size}, {bound} allowed; make it smaller"
    assert bound <= max(budget["design"], LOOSE * size), (
        f"{name}: {size}, but {bound} allowed; lower it: python -m tests.test_budgets --write"
    )


def test_bounds_are_only_ever_lowered_and_not_below_the_design():
    budgets = {name: {"bound": 300, "design": 200} for name in "shrunk grown small reached".split()}
    found = {"shrunk": 250, "grown": 400, "small": 100, "reached": 200}
    bounds = {name: one["bound"] for name, one in lowered(budgets, found).items()}
    assert bounds == {"shrunk": 253, "grown": 300, "small": 200, "reached": 202}


def write_budgets(budgets: dict[str, Budget]) -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(budget)}" for name, budget in budgets.items()]
    BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.test_budgets --write")
    write_budgets(lowered(read_budgets(), sizes()))
