"""The table of `drafttrain bench`: SPEED-Bench's columns, by concurrency."""

from __future__ import annotations

from functools import partial

from rich.table import Table

from drafttrain.evaluation.bench.report import BenchReport
from drafttrain.evaluation.table_style import (
    Column,
    FittedTable,
    add_metrics,
    metric_cells,
    new_table,
)

COLUMNS = (
    Column("tokens_per_second", "output tokens/s", digits=1),
    Column("speedup", "speed-up", suffix="×"),
    Column("tokens_per_second_per_user", "tokens/s per user", digits=1),
    Column("ms_to_first_token", "ms to first token", digits=0),
    Column("draft_acceptance_rate", "draft acceptance rate %", digits=1, percent=True),
    Column("tokens_per_step", "tokens per step"),
)
SIDES = {"without": "without drafter", "with": "with drafter", "server": "server"}


def bench_table(report: BenchReport) -> FittedTable:
    """A row for each server at each concurrency; the prediction below them, if there is one."""
    return FittedTable(partial(_bench_table, report))


def bench_lines(report: BenchReport) -> list[str]:
    """What the table has no column for."""
    lines = [
        f"concurrency {level.concurrency}: {level.identical} of {level.compared} outputs are the "
        "same tokens without and with the drafter"
        for level in report.levels
        if level.compared
    ]
    if report.predicted is not None:
        lines.append(
            f"predicted for rule {report.predicted.rule}, k={report.predicted.k}, p-min="
            f"{report.predicted.p_min:g}: acceptance only, which does not depend on concurrency"
        )
    return lines


def _bench_table(report: BenchReport, intervals: bool) -> Table:
    table = new_table("In servers")
    table.add_column("at once", justify="right")
    table.add_column("server", no_wrap=True)
    add_metrics(table, COLUMNS)
    for level in report.levels:
        for side in level.sides:
            cells = metric_cells(side, COLUMNS, intervals)
            table.add_row(str(level.concurrency), SIDES[side.side], *cells)
    if report.predicted is not None:
        cells = metric_cells(report.predicted, COLUMNS, intervals)
        table.add_row("", "predicted", *cells)
    table.caption = (
        "Acceptance by the servers' own counters; a step is a call of the target behind the first "
        "token. No prompt was asked twice."
    )
    return table
