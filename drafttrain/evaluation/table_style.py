"""What all tables share: columns, cells, Markdown, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from drafttrain.evaluation.bootstrap import Estimate

WIDE = 110
"""Columns of a terminal from which on intervals are printed; report.json always has them."""
LOG_WIDTH = 132
"""Columns of what is no terminal: a log file has room for whole columns."""
HEADING = 18
"""Columns of a terminal that a title takes at most; a longer one goes on in the next line."""


@dataclass(frozen=True)
class Column:
    """A metric as a column."""

    metric: str
    title: str
    digits: int = 2
    percent: bool = False
    suffix: str = ""

    @property
    def heading(self) -> str:
        """The title on as many lines as a narrow column needs."""
        return "\n".join(wrap(self.title, HEADING))

    def number(self, value: float) -> str:
        shown = f"{100 * value if self.percent else value:.{self.digits}f}{self.suffix}"
        return shown.replace("-", "−")

    def interval(self, estimate: Estimate) -> str:
        low, high = self.number(estimate.low), self.number(estimate.high)
        between = " to " if "−" in low else "–"
        return f"{low.removesuffix(self.suffix)}{between}{high}"


class Measured(Protocol):
    """Anything with metrics by name: a run of a report, a replayed policy."""

    @property
    def metrics(self) -> Mapping[str, Estimate]: ...


@dataclass(frozen=True)
class FittedTable:
    """A table that shows intervals where the terminal has room for them."""

    build: Callable[[bool], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self.build(options.max_width >= WIDE)


def new_table(title: str) -> Table:
    """An empty table in the style of all reports."""
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def terminal_cell(run: Measured, column: Column, intervals: bool) -> Text:
    """A value, with its interval below it where it has one."""
    estimate = run.metrics.get(column.metric)
    if estimate is None:
        return Text("–", style="dim")
    cell = Text(column.number(estimate.value))
    if intervals and estimate.low < estimate.high:
        cell.append(f"\n{column.interval(estimate)}", style="dim")
    return cell


def plain_cell(run: Measured, column: Column, intervals: bool) -> str:
    """A figure with its interval, for Markdown."""
    estimate = run.metrics.get(column.metric)
    if estimate is None:
        return "–"
    number = column.number(estimate.value)
    if not intervals or estimate.low == estimate.high:
        return number
    return f"{number} ({column.interval(estimate)})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A Markdown table, all columns but the first (`names` of them) aligned to the right."""
    lines = [header, ["---"] * names + ["---:"] * (len(header) - names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def add_metrics(table: Table, columns: Sequence[Column]) -> None:
    """A column for each metric."""
    for column in columns:
        table.add_column(column.heading, justify="right")


def metric_cells(run: Measured, columns: Sequence[Column], intervals: bool) -> list[Text]:
    """The cells of a row, one for each metric."""
    return [terminal_cell(run, column, intervals) for column in columns]


def print_findings(
    tables: Sequence[RenderableType | None], lines: Sequence[str], files: Sequence[str]
) -> None:
    """The tables that there are, then sentences, then where the files lie."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    for table in tables:
        if table is not None:
            console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    for line in files:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
