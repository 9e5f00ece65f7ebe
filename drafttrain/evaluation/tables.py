"""Tables of a report: for the terminal (Rich) and for documents (Markdown)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.report import GAP_TOLERANCE, Report, Run

LOSSY = "lossy"
"""Mark of methods whose output is not the target's own."""


@dataclass(frozen=True)
class Column:
    """A metric as a column."""

    metric: str
    title: str
    digits: int = 2
    percent: bool = False
    suffix: str = ""

    def number(self, value: float) -> str:
        return f"{100 * value if self.percent else value:.{self.digits}f}{self.suffix}"

    def interval(self, estimate: Estimate) -> str:
        low, high = self.number(estimate.low), self.number(estimate.high)
        return f"{low.removesuffix(self.suffix) if self.suffix else low}–{high}"


TOKENS = Column("tokens_per_round", "tokens/round")
SPEEDUP = Column("speedup", "speed-up", suffix="×")
BLEU = Column("bleu", "BLEU", digits=1)
BLEU_DIFFERENCE = Column("bleu_difference", "ΔBLEU to plain")
CONSISTENCY = Column("consistency_bleu", "BLEU to plain", digits=1)
VS_GENERATE = Column("speedup_vs_generate", "vs generate", suffix="×")
VS_BEAM = Column("speedup_vs_beam", "vs beam", suffix="×")
MAIN = (
    TOKENS,
    Column("acceptance_rate", "accepted %", digits=1, percent=True),
    Column("identical", "identical %", digits=1, percent=True),
    BLEU,
    Column("tokens_per_second", "tokens/s", digits=0),
    SPEEDUP,
    VS_GENERATE,
    VS_BEAM,
)
TRADE_OFF = (TOKENS, BLEU, BLEU_DIFFERENCE, CONSISTENCY, SPEEDUP, VS_GENERATE, VS_BEAM)


def columns_present(report: Report, columns: Sequence[Column]) -> list[Column]:
    """The columns for which some run has a value."""
    return [
        column for column in columns if any(column.metric in run.metrics for run in report.runs)
    ]


def main_table(report: Report) -> Table:
    """All runs, one a row; 95 % intervals dimmed."""
    columns = columns_present(report, MAIN)
    table = Table(title=_title(report), caption=_caption(report), title_justify="left")
    table.add_column("method", overflow="fold")
    for column in columns:
        table.add_column(column.title, justify="right")
    for run in report.runs:
        name = Text(run.name)
        if run.lossy:
            name.append(f" {LOSSY}", style="bold yellow")
        table.add_row(name, *[_terminal_cell(run, column) for column in columns])
    return table


def trade_off_table(report: Report) -> Table | None:
    """k or (beta, tau) against tokens a round, quality and speed (SpecDec Tables 3 and 4).

    None where fewer than two methods were measured.
    """
    runs = swept_runs(report)
    if len(runs) < 2:
        return None
    table = Table(title="Trade-off", title_justify="left")
    names = setting_names(runs)
    for name in names:
        table.add_column(name, justify="right")
    columns = columns_present(report, TRADE_OFF)
    for column in columns:
        table.add_column(column.title, justify="right")
    for run in runs:
        cells = [_setting(run, name) for name in names]
        table.add_row(*cells, *[_terminal_cell(run, column) for column in columns])
    return table


def markdown_table(report: Report, intervals: bool = True) -> str:
    """The main table for documents and model cards."""
    columns = columns_present(report, MAIN)
    header = ["method", *[column.title for column in columns]]
    rows = []
    for run in report.runs:
        name = f"{run.name} ({LOSSY})" if run.lossy else run.name
        rows.append([name, *[_plain_cell(run, column, intervals) for column in columns]])
    return _markdown(header, rows)


def markdown_trade_off(report: Report, intervals: bool = True) -> str:
    """The trade-off table for documents; empty where fewer than two methods were measured."""
    runs = swept_runs(report)
    if len(runs) < 2:
        return ""
    names, columns = setting_names(runs), columns_present(report, TRADE_OFF)
    header = [*names, *[column.title for column in columns]]
    rows = [
        [_setting(run, name) for name in names]
        + [_plain_cell(run, column, intervals) for column in columns]
        for run in runs
    ]
    return _markdown(header, rows)


def parity_lines(report: Report) -> list[str]:
    """What the token-for-token comparisons of lossless greedy runs showed, one a line."""
    lines = []
    for run in report.runs:
        for parity in run.parity:
            line = f"{run.name}: {parity.identical} of {parity.compared} equal to {parity.against}"
            if parity.differences:
                gaps = [difference.gap for difference in parity.differences]
                verdict = "ties" if parity.holds else "NOT ties: please report this"
                line += (
                    f"; at the first difference the top-2 logit gap is {min(gaps):.1e} to "
                    f"{max(gaps):.1e} ({verdict}, bound {GAP_TOLERANCE:g})"
                )
            lines.append(line)
    return lines


def swept_runs(report: Report) -> list[Run]:
    """The methods, as the rows of a trade-off table."""
    return [run for run in report.runs if run.kind == "method" and run.settings]


def setting_names(runs: Sequence[Run]) -> list[str]:
    """Settings that some run has, in the usual order."""
    return [name for name in ("k", "beta", "tau") if any(name in run.settings for run in runs)]


def _setting(run: Run, name: str) -> str:
    if name in run.settings:
        return f"{run.settings[name]:g}"
    return "strict" if name == "beta" and run.lossless else "–"


def _terminal_cell(run: Run, column: Column) -> Text:
    estimate = run.metrics.get(column.metric)
    if estimate is None:
        return Text("–", style="dim")
    cell = Text(column.number(estimate.value))
    if estimate.low < estimate.high:
        cell.append(f"\n{column.interval(estimate)}", style="dim")
    return cell


def _plain_cell(run: Run, column: Column, intervals: bool) -> str:
    estimate = run.metrics.get(column.metric)
    if estimate is None:
        return "–"
    number = column.number(estimate.value)
    if not intervals or estimate.low == estimate.high:
        return number
    return f"{number} ({column.interval(estimate)})"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _title(report: Report) -> str:
    return f"{report.target.path} on {report.data.path}, {report.data.prompts} inputs"


def _caption(report: Report) -> str:
    machine = report.environment.gpu if "cuda" in report.target.device else None
    machine = machine or f"{report.environment.cpu}, {report.environment.threads} threads"
    note = f"95 % bootstrap intervals over inputs. {report.target.dtype}, {machine}."
    if report.mode == "teacher-forced":
        note += " Teacher-forced: acceptance along the target's own outputs; no speed."
    if report.data.skipped:
        note += f" {len(report.data.skipped)} inputs skipped."
    if any(run.lossy for run in report.runs):
        note += f" {LOSSY}: the output is not the target's own."
    return note
