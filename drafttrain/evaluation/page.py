"""How figures are shown: a table in a terminal, Markdown and HTML, and a report as one HTML page.

The page needs no other file and no network, and is light or dark as its reader's screen.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

from rich import table as rich
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.text import Text

from drafttrain.evaluation.bootstrap import Estimate

WIDE = 110
"""Columns of a terminal from which on intervals are printed; report.json always has them."""
LOG_WIDTH = 132
"""Columns of what is no terminal: a log file has room for whole columns."""
LONGEST_NAME, SHORTENED_NAME = 26, 18
"""Columns of a terminal that a row's name takes; a longer one goes on in the next line. The second
is that of a narrow terminal, and of titles."""


@dataclass(frozen=True)
class Column:
    """A column of a table: what it shows of a row, and how."""

    title: str
    of: Callable[[Any], Estimate | float | int | str | None]
    digits: int = 2
    percent: bool = False
    suffix: str = ""
    narrow: bool = True
    """Whether a narrow terminal has room for it."""

    def number(self, value: float) -> str:
        shown = f"{100 * value if self.percent else value:,.{self.digits}f}{self.suffix}"
        return shown.replace("-", "−")

    def parts(self, row: object) -> tuple[str, str]:
        """A row's value and its interval as text; the interval is empty where there is none."""
        value = self.of(row)
        if isinstance(value, Estimate):
            low, high = self.number(value.low), self.number(value.high)
            between = " to " if "−" in low else "–"
            interval = f"{low.removesuffix(self.suffix)}{between}{high}"
            return self.number(value.value), interval if value.low < value.high else ""
        if isinstance(value, float):
            return self.number(value), ""
        return "–" if value is None else str(value), ""


@dataclass(frozen=True)
class Table:
    """A table; Rich prints it with intervals where the terminal has room for them."""

    title: str
    columns: Sequence[Column]
    """The first one names the row."""
    rows: Sequence[Any]
    note: str = ""
    """How to read it."""
    is_best: Callable[[Any], bool] = lambda row: False
    """Whether the page highlights a row."""

    def cells(self, row: object, intervals: bool = True) -> list[str]:
        """A row as text, intervals in brackets."""
        parts = [column.parts(row) for column in self.columns]
        return [f"{value} ({more})" if more and intervals else value for value, more in parts]

    def markdown(self, intervals: bool = True) -> str:
        """The table for documents and model cards."""
        header = [column.title for column in self.columns]
        lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
        lines += [self.cells(row, intervals) for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def html(self) -> str:
        header = "".join(f"<th>{escape(column.title)}</th>" for column in self.columns)
        lines = [f"<tr>{header}</tr>"]
        for row in self.rows:
            mark = ' class="best"' if self.is_best(row) else ""
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in self.cells(row))
            lines.append(f"<tr{mark}>{cells}</tr>")
        return "\n".join(['<div class="wide"><table>', *lines, "</table></div>"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[rich.Table]:
        wide = options.max_width >= WIDE
        table = rich.Table(
            title=self.title,
            title_justify="left",
            caption=self.note,
            caption_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        shown = [place for place, one in enumerate(self.columns) if wide or one.narrow]
        for place in shown:
            title = "\n".join(wrap(self.columns[place].title, SHORTENED_NAME))
            table.add_column(title, justify="right" if place else "left")
        for row in self.rows:
            name, *cells = self.cells(row, intervals=wide)
            cells = ["\n ".join(wrap(name, LONGEST_NAME if wide else SHORTENED_NAME)), *cells]
            table.add_row(*(Text(cells[place].replace(" (", "\n(")) for place in shown))
        yield table


def print_findings(tables: Sequence[Table], lines: Sequence[str], files: Sequence[str]) -> None:
    """The tables, then sentences, then where the files lie."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    for table in tables:
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
    cards: Sequence[Card]
    verdicts: Sequence[str]
    """Findings, one sentence each."""
    plot: bytes
    """PNG."""
    plot_text: str
    """What the plot shows, for readers who cannot see it."""
    tables: Sequence[Table]
    notes: Sequence[str]


def render_page(page: Page) -> str:
    """Returns the page as HTML, with style and plot inside and all text escaped."""
    image, text = b64encode(page.plot).decode("ascii"), escape(page.plot_text)
    cards = [
        f'<div class="card"><span class="dim">{escape(card.label)}</span>'
        f"<b>{escape(card.value)}</b>{escape(card.detail)}</div>"
        for card in page.cards
    ]
    parts = [
        f"<h1>{escape(page.title)}</h1>",
        f'<p class="dim">{escape(page.subtitle)}</p>',
        *(['<div class="cards">', *cards, "</div>"] if cards else []),
        *(f"<p>{escape(line)}</p>" for line in page.verdicts),
        f'<figure><img src="data:image/png;base64,{image}" alt="{text}"></figure>',
        *(f"<h2>{escape(table.title)}</h2>\n{table.html()}" for table in page.tables),
        *(f'<p class="dim">{escape(line)}</p>' for line in page.notes),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )
