"""Tables of a report: for the terminal (Rich) and for documents (Markdown)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from drafttrain.config.sweep import SWEEPABLE
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.report import GAP_TOLERANCE, Report, Run
from drafttrain.evaluation.trees.comparison import compared_by

LOSSY = "lossy"
"""Mark of methods whose output is not the target's own."""
WIDE = 110
"""Columns of a terminal from which on intervals are printed; report.json always has them."""


@dataclass(frozen=True)
class Column:
    """A metric as a column."""

    metric: str
    title: str
    digits: int = 2
    percent: bool = False
    suffix: str = ""

    def number(self, value: float) -> str:
        shown = f"{100 * value if self.percent else value:.{self.digits}f}{self.suffix}"
        return shown.replace("-", "−")

    def interval(self, estimate: Estimate) -> str:
        low, high = self.number(estimate.low), self.number(estimate.high)
        between = " to " if "−" in low else "–"
        return f"{low.removesuffix(self.suffix)}{between}{high}"


TOKENS = Column("mean_acceptance_length", "tokens a round")
SPEEDUP = Column("speedup", "speed-up", suffix="×")
BLEU = Column("bleu", "BLEU", digits=1)
BLEU_DIFFERENCE = Column("bleu_difference", "ΔBLEU to plain")
CONSISTENCY = Column("consistency_bleu", "BLEU to plain", digits=1)
VS_GENERATE = Column("speedup_vs_generate", "vs generate", suffix="×")
VS_BEAM = Column("speedup_vs_beam", "vs beam", suffix="×")
MAIN = (
    TOKENS,
    Column("identical", "equal %", digits=1, percent=True),
    BLEU,
    Column("tokens_per_second", "tok/s", digits=0),
    SPEEDUP,
    VS_GENERATE,
    VS_BEAM,
)
CALLS = (Column("swi", "SWI"), Column("mbsu", "SWI by size"))
"""Columns of reports with cascades: tokens over the cost of all calls (CS Drafting)."""
TRADE_OFF = (TOKENS, BLEU, BLEU_DIFFERENCE, CONSISTENCY, SPEEDUP, VS_GENERATE, VS_BEAM)


class Measured(Protocol):
    """Anything with metrics by name: a run of a report, a replayed policy."""

    @property
    def metrics(self) -> Mapping[str, Estimate]: ...


def columns_present(report: Report, columns: Sequence[Column]) -> list[Column]:
    """The columns for which some run has a value."""
    return [
        column for column in columns if any(column.metric in run.metrics for run in report.runs)
    ]


def main_columns(report: Report) -> list[Column]:
    """Columns of the main table; where drafters of several kinds call each other, SWI too."""
    several = any(run.costs is not None and len(run.costs.calls) > 1 for run in report.runs)
    return columns_present(report, (TOKENS, *CALLS, *MAIN[1:]) if several else MAIN)


@dataclass(frozen=True)
class FittedTable:
    """A table that shows intervals where the terminal has room for them."""

    build: Callable[[bool], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self.build(options.max_width >= WIDE)


def main_table(report: Report) -> FittedTable:
    """All runs, one a row; 95 % intervals below the values, dimmed."""
    return FittedTable(partial(_main_table, report))


def trade_off_table(report: Report) -> FittedTable | None:
    """k or (beta, tau) against tokens a round, quality and speed (SpecDec Tables 3 and 4).

    None where fewer than two methods were measured.
    """
    if len(swept_runs(report)) < 2:
        return None
    return FittedTable(partial(_trade_off_table, report))


def markdown_table(report: Report, intervals: bool = True) -> str:
    """The main table for documents and model cards."""
    columns = main_columns(report)
    header = ["method", *[column.title for column in columns]]
    rows = []
    for run in report.runs:
        name = f"{run.name} ({LOSSY})" if run.lossy else run.name
        rows.append([name, *[plain_cell(run, column, intervals) for column in columns]])
    return markdown(header, rows)


def markdown_trade_off(report: Report, intervals: bool = True) -> str:
    """The trade-off table for documents; empty where fewer than two methods were measured."""
    runs = swept_runs(report)
    if len(runs) < 2:
        return ""
    names, columns = setting_names(runs), columns_present(report, TRADE_OFF)
    header = [*names, *[column.title for column in columns]]
    rows = [
        [_setting(run, name) for name in names]
        + [plain_cell(run, column, intervals) for column in columns]
        for run in runs
    ]
    return markdown(header, rows)


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
    """The methods that a sweep varied, as the rows of a trade-off table; none among trees that are
    compared, which have a table of their own."""
    if compared_by(report) is not None:
        return []
    return [
        run
        for run in report.runs
        if run.kind == "method" and any(name in run.settings for name in SWEEPABLE)
    ]


def setting_names(runs: Sequence[Run]) -> list[str]:
    """Settings that some run has, in the usual order."""
    return [name for name in SWEEPABLE if any(name in run.settings for run in runs)]


def _main_table(report: Report, intervals: bool) -> Table:
    table = new_table(_title(report))
    table.caption = _caption(report, intervals)
    columns = main_columns(report)
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right")
    for run in report.runs:
        cells = [terminal_cell(run, column, intervals) for column in columns]
        table.add_row(_terminal_name(run), *cells)
    return table


def _trade_off_table(report: Report, intervals: bool) -> Table:
    runs = swept_runs(report)
    table = new_table("Trade-off")
    names, columns = setting_names(runs), columns_present(report, TRADE_OFF)
    for title in [*names, *[column.title for column in columns]]:
        table.add_column(title, justify="right")
    for run in runs:
        settings = [_setting(run, name) for name in names]
        table.add_row(*settings, *[terminal_cell(run, column, intervals) for column in columns])
    return table


def _terminal_name(run: Run) -> Text:
    """The name with its mark, a long one on two lines."""
    mark = (f" {LOSSY}", "bold yellow") if run.lossy else ""
    if len(run.name) <= 26 or run.verifier is None:
        return Text.assemble(run.name, mark)
    first = run.name.removesuffix(run.verifier).rstrip()
    return Text.assemble(first, mark, f"\n {run.verifier}")


def _setting(run: Run, name: str) -> str:
    if name in run.settings:
        return f"{run.settings[name]:g}"
    return "strict" if name == "beta" and run.lossless else "–"


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


def _title(report: Report) -> str:
    return f"{report.target.path} on {report.data.path}, {report.data.prompts} inputs"


def _caption(report: Report, intervals: bool) -> str:
    machine = report.environment.gpu if "cuda" in report.target.device else None
    machine = machine or f"{report.environment.cpu}, {report.environment.threads} threads"
    note = f"{report.target.dtype}, {machine}."
    if intervals:
        note = f"95 % bootstrap intervals over inputs. {note}"
    if report.mode == "teacher-forced":
        note += " Teacher-forced: acceptance along the target's own outputs; no speed."
    if report.data.skipped:
        note += f" {len(report.data.skipped)} inputs skipped."
    if any(run.lossy for run in report.runs):
        note += f" {LOSSY}: the output is not the target's own."
    return note
