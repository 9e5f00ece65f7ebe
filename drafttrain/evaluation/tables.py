"""Tables of a report: for the terminal (Rich) and for documents (Markdown)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from textwrap import wrap

from rich.table import Table
from rich.text import Text

from drafttrain.config.sweep import SWEEPABLE
from drafttrain.config.verifiers import RULES
from drafttrain.evaluation.report import Parity, Report, Run
from drafttrain.evaluation.table_style import (
    Column,
    FittedTable,
    add_metrics,
    markdown,
    metric_cells,
    new_table,
    plain_cell,
)
from drafttrain.evaluation.trees.comparison import compared_by

DRAFTER = "drafter"
LOSSY = "lossy"
"""Mark of methods whose output is not the target's own."""
STRICT = {rule.settings[0].name for rule in RULES.values() if rule.settings and not rule.lossless}
"""The first setting of each lossy rule: lossless runs, which have none, are `strict` there."""
LENGTH = Column("mean_acceptance_length", "mean acceptance length")
SPEEDUP = Column("speedup", "speed-up", suffix="×")
BLEU = Column("bleu", "BLEU", digits=1)
BLEU_DIFFERENCE = Column("bleu_difference", "ΔBLEU to plain")
AGREEMENT = Column("target_agreement", "target agrees %", digits=1, percent=True)
CONSISTENCY = Column("consistency_bleu", "BLEU to plain", digits=1)
VS_GENERATE = Column("speedup_vs_generate", "vs generate", suffix="×")
VS_BEAM = Column("speedup_vs_beam", "vs beam", suffix="×")
WER = Column("wer", "word error %")
WER_DIFFERENCE = Column("wer_difference", "Δ word error to plain")
FACTORS = (
    Column("rtf", "real-time factor", digits=3),
    Column("rtf_encoder", "encoder", digits=3),
    Column("rtf_decoder", "decoder", digits=3),
)
MAIN = (
    LENGTH,
    Column("identical", "equal %", digits=1, percent=True),
    AGREEMENT,
    BLEU,
    WER,
    Column("tokens_per_second", "tok/s", digits=0),
    SPEEDUP,
    VS_GENERATE,
    VS_BEAM,
)
CALLS = (Column("swi", "SWI"), Column("mbsu", "SWI by size"))
"""Columns of reports with cascades: tokens over the cost of all calls (CS Drafting)."""
QUALITY = (BLEU, BLEU_DIFFERENCE, CONSISTENCY, WER, WER_DIFFERENCE, AGREEMENT)
TRADE_OFF = (LENGTH, *QUALITY, SPEEDUP, VS_GENERATE, VS_BEAM)


def columns_present(report: Report, columns: Sequence[Column]) -> list[Column]:
    """The columns for which some run has a value."""
    return [
        column for column in columns if any(column.metric in run.metrics for run in report.runs)
    ]


def main_columns(report: Report) -> list[Column]:
    """Columns of the main table; where drafters of several kinds call each other, SWI too."""
    several = any(run.costs is not None and len(run.costs.calls) > 1 for run in report.runs)
    return columns_present(report, (LENGTH, *CALLS, *MAIN[1:]) if several else MAIN)


def main_table(report: Report) -> FittedTable:
    """All runs, one a row; 95 % intervals below the values, dimmed."""
    return FittedTable(partial(_main_table, report))


def trade_off_table(report: Report) -> FittedTable | None:
    """k and (beta, tau) against mean acceptance length, quality and speed (SpecDec
    Tables 3 and 4).

    None where fewer than two methods were measured.
    """
    if len(swept_runs(report)) < 2:
        return None
    return FittedTable(partial(_trade_off_table, report))


def speech_table(report: Report) -> FittedTable | None:
    """Where the time of transcribing goes, in seconds a second of audio; None for texts."""
    if not columns_present(report, FACTORS):
        return None
    return FittedTable(partial(_speech_table, report))


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
        [setting_cell(run, name) for name in names]
        + [plain_cell(run, column, intervals) for column in columns]
        for run in runs
    ]
    return markdown(header, rows)


def parity_lines(report: Report) -> list[str]:
    """What the token-for-token comparisons of runs showed, one a line.

    Lossless runs of this engine; other engines, whose rounding is another, by the count alone.
    """
    lines = []
    for run in report.runs:
        lines += [parity_line(run.name, parity) for parity in run.parity]
        for result in run.batches:
            if result.parity is not None and result.parity.differences:
                name = f"{run.name}, batch {result.batch_size}"
                lines.append(parity_line(name, result.parity))
    return lines


def parity_line(name: str, parity: Parity) -> str:
    """How many outputs are equal, and what is the matter where others part."""
    line = f"{name}: {parity.identical} of {parity.compared} equal to {parity.against}"
    if not parity.differences:
        return line
    seen = f"{min(parity.gaps):.1e} to {max(parity.gaps):.1e}"
    verdict = "ties"
    if not parity.holds:
        verdict = f"{parity.unexplained} are NOT ties: please report this"
    bound = f"bound {parity.bound:.2g}"
    return f"{line}; at the first difference the top-2 logit gap is {seen} ({verdict}, {bound})"


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
    """Settings that some run has, in the usual order; the drafter too, where there are others."""
    several = [DRAFTER] if any(run.other for run in runs) else []
    return several + [name for name in SWEEPABLE if any(name in run.settings for run in runs)]


def _main_table(report: Report, intervals: bool) -> Table:
    table = new_table(f"{report.target.path} on {report.data.path}, {report.data.prompts} inputs")
    table.caption = _caption(report, intervals)
    columns = main_columns(report)
    table.add_column("method", no_wrap=True)
    add_metrics(table, columns)
    for run in report.runs:
        table.add_row(terminal_name(run), *metric_cells(run, columns, intervals))
    return table


def _speech_table(report: Report, intervals: bool) -> Table:
    table = new_table("Real-time factors")
    table.add_column("method", no_wrap=True)
    add_metrics(table, FACTORS)
    for run in report.runs:
        table.add_row(terminal_name(run), *metric_cells(run, FACTORS, intervals))
    return table


def _trade_off_table(report: Report, intervals: bool) -> Table:
    runs = swept_runs(report)
    table = new_table("Trade-off")
    names, columns = setting_names(runs), columns_present(report, TRADE_OFF)
    for name in names:
        table.add_column(name, justify="right")
    add_metrics(table, columns)
    for run in runs:
        settings = [setting_cell(run, name) for name in names]
        table.add_row(*settings, *metric_cells(run, columns, intervals))
    return table


def terminal_name(run: Run) -> Text:
    """The name with its mark, a long one on several lines."""
    mark = (f" {LOSSY}", "bold yellow") if run.lossy else ""
    if len(run.name) <= 26:
        return Text.assemble(run.name, mark)
    if run.verifier is None:
        return Text("\n ".join(wrap(run.name, 26)))
    first = run.name.removesuffix(run.verifier).rstrip()
    return Text.assemble(first, mark, f"\n {run.verifier}")


def setting_cell(run: Run, name: str) -> str:
    """A setting of a run, or its drafter."""
    if name == DRAFTER:
        return run.other or run.drafter or "–"
    if name in run.settings:
        return shown(run.settings[name])
    return "strict" if name in STRICT and run.lossless else "–"


def shown(value: float) -> str:
    """The value of a setting, as tables and plots have it."""
    return f"{value:g}"


def _caption(report: Report, intervals: bool) -> str:
    note = machine_note(report, intervals)
    if any(run.lossy for run in report.runs):
        note += f" {LOSSY}: the output is not the target's own."
    return note


def machine_note(report: Report, intervals: bool) -> str:
    """What a report was measured with, and what it left out."""
    machine = report.environment.gpu if "cuda" in report.target.device else None
    machine = machine or f"{report.environment.cpu}, {report.environment.threads} threads"
    note = f"{report.target.dtype}, {machine}."
    if intervals:
        note = f"95 % bootstrap intervals over inputs. {note}"
    if report.data.skipped:
        note += f" {len(report.data.skipped)} inputs skipped."
    return note
