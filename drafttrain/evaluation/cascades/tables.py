"""The table and the sentences of a search for increments, for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from drafttrain.evaluation.cascades.report import CandidateResult, CascadeReport
from drafttrain.evaluation.table_style import (
    Column,
    FittedTable,
    add_metrics,
    metric_cells,
    new_table,
)

COLUMNS = (
    Column("swi", "SWI"),
    Column("mean_acceptance_length", "mean acceptance length"),
    Column("regret", "regret %", digits=1, percent=True),
)
SHOWN = 8
"""The best candidates that are shown, beside the default and the first level alone."""


def cascade_table(report: CascadeReport) -> FittedTable:
    """The best candidates of those that saw all prompts, and those that regrets are told of."""
    return FittedTable(lambda intervals: _cascade_table(report, intervals))


def cascade_lines(report: CascadeReport) -> list[str]:
    """The costs, what the usual cascades miss, and how many calls replay saved."""
    costs = ", ".join(f"{name} {cost:.3f}" for name, cost in report.costs.items())
    how = (
        f"measured on {report.timing_prompts} prompts"
        if report.costs_from == "measured"
        else "parameters over the target's"
    )
    lines = [f"a call costs, in target calls ({how}): {costs}", f"best: {report.best}"]
    shown = report.reported or report.candidates
    for title, name in (("default", report.default), ("first level alone", report.first_alone)):
        [result] = [one for one in shown if one.name == name]
        lines.append(f"{title} {name}: {_missing(result)}")
    where = "" if report.reported_data is None else f" on {report.reported_data.path}"
    if report.reported_data is None:
        lines.append(
            "these are the prompts that it was chosen on; give --report-data for unbiased figures"
        )
    else:
        [best] = [one for one in report.reported if one.name == report.best]
        swi = best.metrics["swi"]
        lines.append(
            f"SWI of the best{where}, {best.prompts} inputs: {swi.value:.2f} "
            f"({swi.low:.2f}–{swi.high:.2f})"
        )
    calls = ", ".join(
        f"{name} {facts.made:,} of {facts.asked:,}" for name, facts in report.replayed.items()
    )
    lines.append(f"calls made of those asked for: {calls}; {report.seconds:.0f} s")
    return lines


def _missing(result: CandidateResult) -> str:
    if "regret" not in result.metrics:
        return f"SWI {result.metrics['swi'].value:.2f}"
    regret = result.metrics["regret"]
    low, value, high = (
        f"{100 * share:.1f}".replace("-", "−") for share in (regret.low, regret.value, regret.high)
    )
    return f"SWI {result.metrics['swi'].value:.2f}, {value} % below the best ({low} to {high})"


def _cascade_table(report: CascadeReport, intervals: bool) -> Table:
    table = new_table(
        f"{report.target.path} with {' > '.join(report.levels)} on {report.data.path}, "
        f"{report.data.prompts} inputs"
    )
    table.caption = (
        f"{len(report.candidates)} candidates, replayed. Calls for every 100 tokens. "
        "Chosen on these inputs, so that the best is flattered."
    )
    table.add_column("increments", no_wrap=True)
    add_metrics(table, COLUMNS)
    for name in ("target", *report.levels):
        table.add_column(f"{name} calls", justify="right")
    for result in _shown(report):
        name = Text(result.name, style="bold" if result.name == report.best else "")
        if result.origin not in ("random", "neighbour"):
            name.append(f"\n{result.origin}", style="dim")
        counts = [result.target_calls, *(result.calls.get(level, 0) for level in report.levels)]
        calls = [f"{100 * count / result.tokens:.0f}" for count in counts]
        table.add_row(name, *metric_cells(result, COLUMNS, intervals), *calls)
    return table


def _shown(report: CascadeReport) -> list[CandidateResult]:
    most = report.data.prompts
    full = [result for result in report.candidates if result.prompts == most]
    always = (report.default, report.first_alone)
    return [one for place, one in enumerate(full) if place < SHOWN or one.name in always]
