"""A tuning report as one HTML page: no other file, no network, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO

import matplotlib
from matplotlib.figure import Figure

from drafttrain.evaluation.plot_style import tidy
from drafttrain.evaluation.stops.plots import Panel, all_panels
from drafttrain.evaluation.stops.report import BatchChoice, TuneReport
from drafttrain.evaluation.stops.tables import COLUMNS, cost_lines, main_policies, verdict_lines
from drafttrain.evaluation.table_style import plain_cell

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
  margin-top: 1.4rem; }
.card, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.2rem; margin: 0; }
.card b { display: block; font-size: 1.5rem; line-height: 1.2; margin: .2rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(23rem, 1fr)); gap: 1rem; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: .45rem .8rem; text-align: right; border-top: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 600; border-top: 0; white-space: normal; }
th:first-child, td:first-child { text-align: left; } tr.best td { background: var(--best);
  font-weight: 600; }
"""


def tune_page(report: TuneReport) -> str:
    """The whole page: the choice at every batch size, pictures, policies, predictions, costs."""
    replayed = report.reported
    title = f"{report.target.path} with {report.drafter}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">Stop policies, trees and cascades on {replayed.data.prompts} prompts of '
        f"{escape(replayed.data.path)}; {escape(_machine(report))}</p>",
        _in('<div class="cards">', map(_card, report.batches), "</div>"),
        "<h2>What was found</h2>",
        *(f"<p>{escape(line)}</p>" for line in verdict_lines(report)),
        "<h2>Pictures</h2>",
        _in('<div class="figures">', map(_figure, all_panels(report)), "</div>"),
        "<h2>Candidates</h2>",
        _policies(report),
    ]
    if report.checked:
        parts += ["<h2>Predicted and decoded</h2>", _checked(report)]
    parts += ["<h2>Costs on this machine</h2>"]
    parts += [f"<p>{escape(line)}</p>" for line in cost_lines(report)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _card(choice: BatchChoice) -> str:
    times = choice.tokens_per_second.value / choice.plain_tokens_per_second
    return (
        f'<div class="card"><span class="dim">batch {choice.batch_size}</span>'
        f"<b>{escape(choice.best)}</b>{choice.tokens_per_second.value:,.0f} tokens/s predicted, "
        f"{times:.2f}× plain decoding<br>"
        f'<span class="dim">{100 * choice.gain.value:+.1f} % over {escape(choice.best_fixed)}; '
        f"{100 * choice.regret.value:.1f} % short of the oracle of chains</span></div>"
    )


def _policies(report: TuneReport) -> str:
    rows = [
        (policy.name, [plain_cell(policy, column, True) for column in COLUMNS])
        for policy in main_policies(report)
    ]
    return _table(["candidate", *(column.title for column in COLUMNS)], rows, report.best)


def _checked(report: TuneReport) -> str:
    rows = [
        (
            one.name,
            [
                str(one.batch_size),
                f"{one.decoded:,.0f}",
                f"{one.predicted_speedup:.2f}×",
                f"{one.decoded_speedup:.2f}×",
                f"{100 * one.error:+.1f}",
            ],
        )
        for one in report.checked
    ]
    titles = ["candidate", "batch", "decoded tok/s", "× plain predicted", "× plain decoded"]
    return _table([*titles, "error %"], rows)


def _table(
    titles: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], best: str | None = None
) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(title)}</th>" for title in titles) + "</tr>"]
    for name, cells in rows:
        mark = ' class="best"' if name == best else ""
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in (name, *cells))
        lines.append(f"<tr{mark}>{shown}</tr>")
    return _in('<div class="wide"><table>', lines, "</table></div>")


def _figure(panel: Panel) -> str:
    """A panel as inline SVG, in the page's own colours."""
    figure = Figure(figsize=(5.6, 4.4), layout="constrained")
    axis = figure.subplots()
    panel(axis)
    tidy(axis)
    drawn = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": axis.get_title()}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return f"<figure>{page_colours(drawn.getvalue())}</figure>"


def page_colours(svg: str) -> str:
    """The drawing without what stands before it; black and white become the page's colours, which
    text takes too."""
    svg = svg[svg.index("<svg") :]
    if "<metadata>" in svg:
        svg = svg[: svg.index("<metadata>")] + svg[svg.index("</metadata>") + len("</metadata>") :]
    svg = svg.replace('<text style="', '<text style="fill: currentColor; ')
    for colour, own in (("#000000", "currentColor"), ("#ffffff", "var(--card)")):
        svg = svg.replace(colour, own)
    return svg.replace("#ebebeb", "var(--line)")


def _machine(report: TuneReport) -> str:
    environment = report.environment
    return f"{environment.gpu or environment.cpu}, {environment.threads} threads"


def _in(before: str, parts: Iterable[str], after: str) -> str:
    return "\n".join([before, *parts, after])
