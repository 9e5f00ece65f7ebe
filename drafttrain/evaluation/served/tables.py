"""The table of what a server will show, and the settings that follow from it."""

from __future__ import annotations

from functools import partial

from rich.table import Table
from rich.text import Text

from drafttrain.evaluation.report import Report, ServedRun
from drafttrain.evaluation.served.rules import RULES, served_by_default
from drafttrain.evaluation.table_style import (
    Column,
    FittedTable,
    add_metrics,
    metric_cells,
    new_table,
)

POSITIONS = 6
"""Positions that the table has room for; report.json has them all."""
LENGTH = Column("mean_acceptance_length", "mean acceptance length")
RATE = Column("draft_acceptance_rate", "draft acceptance rate %", digits=1, percent=True)
PER_STEP = Column("tokens_per_step", "tokens per step")
ALONE = Column("token_acceptance_rate", "token acceptance rate %", digits=1, percent=True)


def served_table(report: Report) -> FittedTable | None:
    """A row for each rule, draft length and p-min; None where nothing was judged."""
    return FittedTable(partial(_served_table, report)) if report.served else None


def synthetic_lines(report: Report) -> list[str]:
    """Settings for synthetic acceptance under the rule that engines go by if not told otherwise."""
    rule = served_by_default(all(run.rule == "greedy" for run in report.served)).name
    return [
        f"synthetic, {_drafter(report, run)}{rule}, k={run.k}, {engine}: {settings}"
        for run in report.served
        if run.rule == rule
        for engine, settings in run.synthetic.items()
    ]


def _drafter(report: Report, run: ServedRun) -> str:
    """Whose drafts they are, where there are several drafters."""
    return f"{run.drafter}, " if len({one.drafter for one in report.served}) > 1 else ""


def _served_table(report: Report, intervals: bool) -> Table:
    table = new_table("As served, by the rule of acceptance")
    asked = [run.p_min > 0 for run in report.served]
    columns = [ALONE, LENGTH, *([PER_STEP] if any(asked) else []), RATE]
    several = len({run.drafter for run in report.served}) > 1
    if several:
        table.add_column("drafter")
    table.add_column("rule", no_wrap=True)
    table.add_column("k", justify="right")
    if any(asked):
        table.add_column("p-min", justify="right")
    add_metrics(table, columns)
    table.add_column("per position %")
    for run in report.served:
        stops = [f"{run.p_min:g}"] if any(asked) else []
        cells = metric_cells(run, columns, intervals)
        named = [Text(run.drafter)] if several else []
        table.add_row(*named, run.rule, str(run.k), *stops, *cells, _positions(run))
    table.caption = _caption(report)
    return table


def _positions(run: ServedRun) -> str:
    shown = [f"{100 * rate.value:.0f}" for rate in run.per_position_acceptance_rates]
    more = [] if len(shown) <= POSITIONS else ["…"]
    return " ".join(shown[:POSITIONS] + more)


def _caption(report: Report) -> str:
    named = {run.rule for run in report.served}
    where = [f"{rule.name}: {rule.engines}." for rule in RULES if rule.name in named]
    note = "Names and counts as vLLM's: the bonus token is in the length, drafts start behind the "
    note += "first token. Drafted from the whole vocabulary, as servers do."
    return " ".join([*where, note])
