"""A report as a self-contained HTML page, in the reader's light or dark colour scheme."""

from __future__ import annotations

from base64 import b64encode
from html import escape as escape_html

from drafttrain.config.command_line import hide_folders
from drafttrain.evaluation.report import Report
from drafttrain.evaluation.tables import (
    METRICS,
    Table,
    heading,
    main_table,
    note,
    parity_lines,
    search_tables,
    speedup_text,
    verdict_lines,
    winners,
)

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


def escape(text: str) -> str:
    """Escapes text for HTML and hides the folders of this machine."""
    return escape_html(hide_folders(text))


def render_page(report: Report, plot: bytes) -> str:
    """Returns the page as HTML, with style and plot (PNG) embedded and all text escaped."""
    title, subtitle = map(escape, heading(report))
    label = "fastest" if report.search is None else "chosen"
    cards = []
    for size, run in winners(report).items():
        speed, _ = METRICS["tokens_per_second"].parts(run)
        cards.append(
            f'<div class="card"><span class="dim">{label}, batch size {size}</span>'
            f"<b>{escape(run.name)}</b>{escape(f'{speed} tokens/s, {speedup_text(run)}')}</div>"
        )
    image = f"data:image/png;base64,{b64encode(plot).decode('ascii')}"
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="dim">{subtitle}</p>',
        *(['<div class="cards">', *cards, "</div>"] if cards else []),
        *(f"<p>{escape(line)}</p>" for line in [*parity_lines(report), *verdict_lines(report)]),
        f'<figure><img src="{image}" alt="The figures of the tables below"></figure>',
        *map(table_html, [main_table(report), *search_tables(report)]),
        f'<p class="dim">{escape(note(report))}</p>',
        f'<p class="dim">Command: {escape(report.environment.command)}</p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def table_html(table: Table) -> str:
    """Returns the title and the table as HTML; the best rows have a class of their own."""
    header = "".join(f"<th>{escape(column.title)}</th>" for column in table.columns)
    lines = [f"<h2>{escape(table.title)}</h2>", '<div class="wide"><table>', f"<tr>{header}</tr>"]
    for row in table.rows:
        mark = ' class="best"' if table.is_best(row) else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in table.cells(row))
        lines.append(f"<tr{mark}>{cells}</tr>")
    return "\n".join([*lines, "</table></div>"])
