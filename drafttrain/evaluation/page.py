"""How figures are shown: tables in a terminal, and a report as one HTML page.

The page needs no other file and no network, and is light or dark as its reader's screen.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
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


def metric_cells(run: Measured, columns: Sequence[Column], intervals: bool) -> list[Text]:
    """The values of a row, each with its interval below it where it has one."""
    cells = []
    for column in columns:
        estimate = run.metrics.get(column.metric)
        if estimate is None:
            cells.append(Text("–", style="dim"))
            continue
        cell = Text(column.number(estimate.value))
        if intervals and estimate.low < estimate.high:
            cell.append(f"\n{column.interval(estimate)}", style="dim")
        cells.append(cell)
    return cells


def plain_cell(run: Measured, column: Column, intervals: bool) -> str:
    """A figure with its interval, for Markdown."""
    estimate = run.metrics.get(column.metric)
    if estimate is None:
        return "–"
    number = column.number(estimate.value)
    if not intervals or estimate.low == estimate.high:
        return number
    return f"{number} ({column.interval(estimate)})"


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


STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b1f24;
  --dim: #5c6570; --line: #dfe3e8; --best: #e3f1fb; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --card: #1d2126; --text: #e6e9ed; --dim: #9aa4b0; --line: #343a42;
    --best: #16344a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.2rem 4rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; }
p { margin: .3rem 0; max-width: 60rem; } .dim { color: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem;
  margin: 1.4rem 0; }
.card, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.2rem; margin: 0; }
.card b { display: block; font-size: 1.5rem; line-height: 1.2; margin: .2rem 0; }
figure { background: #ffffff; margin-top: 1.4rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: .45rem .8rem; text-align: right; border-top: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 600; border-top: 0; white-space: normal; }
th:first-child, td:first-child { text-align: left; } tr.best td { background: var(--best);
  font-weight: 600; }
"""


@dataclass(frozen=True)
class PageTable:
    """A table under its caption."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    """One cell for each column of the header."""
    best: str | None = None
    """First cell of the row to highlight."""


@dataclass(frozen=True)
class Card:
    """A headline figure: a dim label, the figure in bold, a line of detail."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a page, in reading order."""

    title: str
    subtitle: str
    """What was measured, on which machine and when."""
    tables: Sequence[PageTable]
    plot: bytes | None = None
    """PNG."""
    plot_text: str = ""
    """What the plot shows, for readers who cannot see it."""
    cards: Sequence[Card] = ()
    verdicts: Sequence[str] = ()
    """Findings, one sentence each."""
    notes: Sequence[str] = ()
    """How to read the figures."""


def render_page(page: Page) -> str:
    """Returns the page as HTML, with style and plot inside and all text escaped.

    Raises ValueError for a table row whose cells do not match the header.
    """
    parts = [f"<h1>{escape(page.title)}</h1>", f'<p class="dim">{escape(page.subtitle)}</p>']
    if page.cards:
        parts += ['<div class="cards">', *map(_card, page.cards), "</div>"]
    parts += [f"<p>{escape(line)}</p>" for line in page.verdicts]
    if page.plot is not None:
        image = b64encode(page.plot).decode("ascii")
        text = escape(page.plot_text)
        parts.append(f'<figure><img src="data:image/png;base64,{image}" alt="{text}"></figure>')
    for table in page.tables:
        parts += [f"<h2>{escape(table.caption)}</h2>", _table(table)]
    parts += [f'<p class="dim">{escape(line)}</p>' for line in page.notes]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _card(card: Card) -> str:
    return (
        f'<div class="card"><span class="dim">{escape(card.label)}</span>'
        f"<b>{escape(card.value)}</b>{escape(card.detail)}</div>"
    )


def _table(table: PageTable) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(title)}</th>" for title in table.header) + "</tr>"]
    for row in table.rows:
        if len(row) != len(table.header):
            raise ValueError(
                f"table {table.caption!r} has {len(table.header)} columns, but row {row[0]!r} has "
                f"{len(row)} cells; give one cell for each column"
            )
        mark = ' class="best"' if row[0] == table.best else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return "\n".join(['<div class="wide"><table>', *lines, "</table></div>"])
