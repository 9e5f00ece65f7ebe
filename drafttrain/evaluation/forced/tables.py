"""The tables of drafters that were followed along the target's own outputs."""

from __future__ import annotations

from functools import partial

from rich.table import Table
from rich.text import Text

from drafttrain.evaluation.report import Report, Run
from drafttrain.evaluation.table_style import (
    Column,
    FittedTable,
    markdown,
    metric_cells,
    new_table,
    plain_cell,
)
from drafttrain.evaluation.tables import LENGTH, columns_present, machine_note, terminal_name

POSITIONS = 8
"""Positions that the table has room for; report.json has them all."""
COLUMNS = (
    LENGTH,
    Column("mean_acceptance_length_difference", "Δ to first"),
    Column("draft_time", "draft time"),
    Column("mbsu", "MBSU"),
    Column("mbsu_difference", "Δ to first"),
    Column("swi", "SWI"),
)
NOTE = (
    "Teacher-forced: acceptance along the target's own outputs. Draft time: of a round, in plain "
    "tokens. MBSU: memory-bound speed-up, by numbers of parameters; SWI: the same by times."
)
SCALES = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def drafter_table(report: Report) -> FittedTable:
    """A row for each drafter and draft length: what it is worth, and what it costs."""
    return FittedTable(partial(_drafter_table, report))


def position_table(report: Report) -> Table | None:
    """Acceptance by position of every run; None where nothing was drafted."""
    runs = [run for run in report.runs if run.acceptance_rate_per_position is not None]
    if not runs:
        return None
    most = max(len(run.acceptance_rate_per_position.drafted) for run in runs)
    table = new_table("Acceptance by position in the draft, %")
    table.add_column("method", no_wrap=True)
    for place in range(min(most, POSITIONS)):
        table.add_column(str(place + 1), justify="right")
    for run in runs:
        table.add_row(terminal_name(run), *position_cells(run)[:POSITIONS])
    more = f" The first {POSITIONS} of {most}." if most > POSITIONS else ""
    table.caption = f"Of the rounds in which all tokens before were accepted.{more}"
    return table


def markdown_drafters(report: Report, intervals: bool = True) -> str:
    """The table of drafters for documents."""
    columns = columns_present(report, COLUMNS)
    header = ["method", "parameters", *[column.title for column in columns]]
    rows = [
        [run.name, shown_count(run), *[plain_cell(run, column, intervals) for column in columns]]
        for run in _drafting(report)
    ]
    return markdown(header, rows)


def position_cells(run: Run) -> list[str]:
    """Conditional acceptance at each position, in percent."""
    rates = run.acceptance_rate_per_position
    shown = [] if rates is None else rates.conditional
    return ["–" if rate is None else f"{100 * rate.value:.0f}" for rate in shown]


def shown_count(run: Run) -> str:
    """The parameters of a run's drafters."""
    count = run.parameters
    if count is None:
        return "–"
    for scale, unit in SCALES:
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return str(count)


def _drafting(report: Report) -> list[Run]:
    return [run for run in report.runs if run.kind == "method"]


def _drafter_table(report: Report, intervals: bool) -> Table:
    columns = columns_present(report, COLUMNS)
    inputs = f"{report.data.prompts} inputs"
    table = new_table(f"{report.target.path} on {report.data.path}, {inputs}")
    table.add_column("method", no_wrap=True)
    table.add_column("param-\neters", justify="right", no_wrap=True)
    for column in columns:  # a word a line: numbers are narrow
        table.add_column("\n".join(column.title.split()), justify="right", no_wrap=True)
    for run in _drafting(report):
        cells = metric_cells(run, columns, intervals)
        table.add_row(terminal_name(run), Text(shown_count(run)), *cells)
    table.caption = f"{machine_note(report, intervals)} {_note(report)}"
    return table


def _note(report: Report) -> str:
    note, timed = NOTE, report.options.get("timing_prompts")
    if timed and any("draft_time" in run.metrics for run in report.runs):
        note += f" Times are of {min(timed, report.data.prompts)} inputs that were decoded."
    if any(run.sampling.get("temperature", 0.0) > 0.0 for run in report.runs):
        note += " Sampled: expected over what is drafted, given the outputs."
    return note
