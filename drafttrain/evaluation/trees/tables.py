"""Draft trees compared at equal depth or budget, for the terminal (Rich) and in Markdown."""

from __future__ import annotations

from functools import partial

from rich.table import Table
from rich.text import Text

from drafttrain.evaluation.report import Report, Run, TreeAxis
from drafttrain.evaluation.table_style import (
    Column,
    FittedTable,
    markdown,
    new_table,
    plain_cell,
    terminal_cell,
)
from drafttrain.evaluation.tables import LENGTH, SPEEDUP, columns_present
from drafttrain.evaluation.trees.comparison import (
    OTHER,
    TreeGroup,
    compared_by,
    size_of,
    tree_groups,
    tree_name,
    tree_runs,
)

COLUMNS = (
    LENGTH,
    Column("expected_accepted", "E(A)"),
    Column("mbsu", "MBSU"),
    Column("tokens_per_second", "tok/s", digits=0),
    SPEEDUP,
)
RANKED = {"mean_acceptance_length", "mbsu", "tokens_per_second", "speedup"}
"""Metrics whose best is marked, where a method has several trees in a group."""
TITLES: dict[TreeAxis, str] = {"depth": "levels", "nodes": "draft tokens"}
BOUND = "≤ "
"""Before the most levels of trees that may have fewer."""


def tree_table(report: Report) -> FittedTable | None:
    """Every tree, grouped by depth or budget; bold: the best of several of its method there.

    None where the report compares no trees.
    """
    axis = compared_by(report)
    return None if axis is None else FittedTable(partial(_tree_table, report, axis))


def markdown_trees(report: Report, intervals: bool = True, best_only: bool = False) -> str:
    """The same for documents; empty where the report compares no trees.

    best_only: of each method and group, only the tree with the highest mean acceptance
    length, unmarked.
    """
    axis = compared_by(report)
    if axis is None:
        return ""
    columns = columns_present(report, COLUMNS)
    header = [TITLES[axis], "method", TITLES[OTHER[axis]], *[column.title for column in columns]]
    rows = []
    for group in tree_groups(report):
        for run in group.runs:
            if best_only and not group.best(run, LENGTH.metric):
                continue
            cells = [plain_cell(run, column, intervals) for column in columns]
            if not best_only:
                cells = [
                    _bold(cell) if _marked(group, run, column) else cell
                    for cell, column in zip(cells, columns, strict=True)
                ]
            rows.append([f"{group.value:g}", tree_name(run), _size(run, axis), *cells])
    return markdown(header, rows, names=2)


def _tree_table(report: Report, axis: TreeAxis, intervals: bool) -> Table:
    at = "depth (levels)" if axis == "depth" else "budget (draft tokens)"
    table = new_table(f"Trees at equal {at}")
    table.caption = "Bold: the best of several trees of its method."
    if any(_size(run, axis).startswith(BOUND) for run in tree_runs(report)):
        table.caption += f" {BOUND}levels: stopped by their gain."
    columns = columns_present(report, COLUMNS)
    table.add_column(TITLES[axis], justify="right")
    table.add_column("method", no_wrap=True)
    for heading in [TITLES[OTHER[axis]], *[column.heading for column in columns]]:
        table.add_column(heading, justify="right")
    for group in tree_groups(report):
        table.add_section()
        for place, run in enumerate(group.runs):
            cells = [_terminal_cell(group, run, column, intervals) for column in columns]
            value = f"{group.value:g}" if place == 0 else ""
            table.add_row(value, tree_name(run), _size(run, axis), *cells)
    return table


def _terminal_cell(group: TreeGroup, run: Run, column: Column, intervals: bool) -> Text:
    cell = terminal_cell(run, column, intervals)
    if _marked(group, run, column):
        cell.stylize("bold", 0, len(cell.plain.partition("\n")[0]))
    return cell


def _bold(cell: str) -> str:
    number, space, interval = cell.partition(" (")
    return f"**{number}**{space}{interval}"


def _marked(group: TreeGroup, run: Run, column: Column) -> bool:
    rivals = len(group.rivals(run)) > 1
    return rivals and column.metric in RANKED and group.best(run, column.metric)


def _size(run: Run, axis: TreeAxis) -> str:
    """The size that was free to differ; of trees that stop by their gain, the most levels."""
    bound = BOUND if axis == "nodes" and "max_draft" in run.sizes else ""
    return f"{bound}{size_of(run, OTHER[axis])}"
