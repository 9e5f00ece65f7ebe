"""The table of a report: for the terminal (Rich), for documents (Markdown), for the page (HTML).

A row is a method at a batch size. What differs between methods (k, h, beta, tau, tree sizes) are
columns, and so is every metric that some row has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap

from rich.table import Table
from rich.text import Text

from drafttrain.config.sweep import SWEEPABLE
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.page import (
    Card,
    Column,
    FittedTable,
    Page,
    PageTable,
    metric_cells,
    new_table,
    plain_cell,
)
from drafttrain.evaluation.report import BatchResult, Parity, Report, Run

LOSSY = "lossy"
"""Mark of methods whose output is not the target's own."""
SPEEDUP = Column("speedup", "speedup", suffix="×")
METRICS = (
    Column("mean_acceptance_length", "mean acceptance length"),
    Column("mean_acceptance_length_difference", "Δ to first drafter"),
    Column("expected_accepted", "E(A)"),
    Column("swi", "SWI"),
    Column("mbsu", "MBSU"),
    Column("greedy_match", "greedy match %", digits=1, percent=True),
    Column("sampled_acceptance", "Σ min(p, q) %", digits=1, percent=True),
    Column("first_choice_acceptance", "p(argmax q) %", digits=1, percent=True),
    Column("identical", "equal %", digits=1, percent=True),
    Column("target_agreement", "target agrees %", digits=1, percent=True),
    Column("bleu", "BLEU", digits=1),
    Column("bleu_difference", "Δ BLEU to plain"),
    Column("consistency_bleu", "BLEU to plain", digits=1),
    Column("wer", "word error %"),
    Column("wer_difference", "Δ word error to plain"),
    Column("rtf", "real-time factor", digits=3),
    Column("rtf_encoder", "encoder", digits=3),
    Column("rtf_decoder", "decoder", digits=3),
    Column("ms_per_token", "ms per token"),
    Column("tokens_per_second", "tok/s", digits=0),
    SPEEDUP,
    Column("speedup_vs_generate", "vs generate", suffix="×"),
    Column("speedup_vs_beam", "vs beam", suffix="×"),
)
LOSSY_ONLY = {"bleu_difference", "consistency_bleu", "wer_difference"}
NARROW = {
    "mean_acceptance_length", "identical", "greedy_match", "sampled_acceptance",
    "tokens_per_second", "speedup", "speedup_vs_generate",
}  # fmt: skip
"""Metrics that a narrow terminal has room for; the page has them all."""
POSITIONS = 6
"""Positions of a draft that the table has room for; report.json has them all."""
LONGEST_NAME = 26
"""Columns of a terminal that a method's name takes; a longer one goes on in the next line."""
SHORTENED_NAME = 18
"""The same on a narrow terminal."""
NUMBERS = re.compile(r"\bk=\d+|\([^()<>]*\)")
"""Settings in a method's name."""


@dataclass(frozen=True)
class Row:
    """One method at one batch size."""

    run: Run
    name: str
    metrics: Mapping[str, Estimate]
    result: BatchResult | None = None
    """Where several batch sizes were measured."""


def report_rows(report: Report) -> list[Row]:
    """The rows in the report's order, every run at each of its batch sizes."""
    names, rows = _names(report), []
    for run, name in zip(report.runs, names, strict=True):
        if not run.batches:
            rows.append(Row(run, name, run.metrics))
        for result in run.batches:
            alone = run.metrics if result.batch_size == 1 else {}
            rows.append(Row(run, name, {**alone, **result.metrics}, result))
    return rows


def setting_names(report: Report) -> list[str]:
    """Settings that are columns: those that some method has, in the usual order."""
    return [name for name in SWEEPABLE if any(name in run.settings for run in report.runs)]


def main_columns(report: Report) -> list[Column]:
    """The metrics that are columns: those that some row has and that say something there."""
    lossy = any(run.lossy for run in report.runs)
    several = any(run.costs is not None and len(run.costs.calls) > 1 for run in report.runs)
    shown = {metric for row in report_rows(report) for metric in row.metrics}
    if not lossy:
        shown -= LOSSY_ONLY
    if not several:  # drafters that call each other (CS Drafting)
        shown -= {"swi"}
    if not (several or _has_trees(report) or report.mode == "teacher-forced"):
        shown -= {"mbsu"}
    if not any(run.batches for run in report.runs):
        shown -= {"ms_per_token"}
    return [column for column in METRICS if column.metric in shown]


def main_table(report: Report) -> FittedTable:
    """The table for the terminal; 95 % intervals below the values, dimmed."""
    return FittedTable(partial(_main_table, report))


def markdown_table(report: Report, intervals: bool = True) -> str:
    """The table for documents and model cards."""
    header, rows = _plain_table(report, intervals)
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def report_page(report: Report, plot: bytes) -> Page:
    """What the HTML page of a report shows."""
    header, rows = _plain_table(report, intervals=True)
    methods = [run for run in report.runs if run.kind == "method"]
    drafters = ", ".join(dict.fromkeys(run.drafter or "" for run in methods))
    return Page(
        title=f"{Path(report.target.path).name}" + (f" with {drafters}" if drafters else ""),
        subtitle=f"{report.data.prompts} prompts of {report.data.path}; "
        f"{machine_note(report, intervals=False)} {report.environment.date[:10]}",
        tables=[PageTable("All methods", header, rows)],
        plot=plot,
        plot_text="The figures of the table below",
        cards=[_card(size, row) for size, row in fastest(report).items()],
        verdicts=parity_lines(report),
        notes=[note(report, intervals=True), f"Command: {report.environment.command}"],
    )


def fastest(report: Report) -> dict[int, Row]:
    """The fastest of the methods and plain decoding at each batch size; none untimed."""
    found: dict[int, list[Row]] = {}
    for row in report_rows(report):
        if row.run.kind != "baseline" and "speedup" in row.metrics:
            found.setdefault(row.result.batch_size if row.result else 1, []).append(row)
    return {
        size: max(rows, key=lambda row: row.metrics["speedup"].value)
        for size, rows in found.items()
    }


def parity_lines(report: Report) -> list[str]:
    """The results of comparing lossless runs token by token, one comparison a line."""
    lines = []
    for run in report.runs:
        lines += [parity_line(run.name, parity) for parity in run.parity]
        lines += [
            parity_line(f"{run.name}, batch {result.batch_size}", result.parity)
            for result in run.batches
            if result.parity is not None and result.parity.differences
        ]
    return lines


def parity_line(name: str, parity: Parity) -> str:
    """How many outputs are equal, and whether rounding explains the others."""
    line = f"{name}: {parity.identical} of {parity.compared} equal to {parity.against}"
    if not parity.differences:
        return line
    seen = f"{min(parity.gaps):.1e} to {max(parity.gaps):.1e}"
    verdict = "ties"
    if not parity.holds:
        verdict = f"{parity.unexplained} are NOT ties: please report this"
    bound = f"bound {parity.bound:.2g}"
    return f"{line}; at the first difference the top-2 logit gap is {seen} ({verdict}, {bound})"


def machine_note(report: Report, intervals: bool) -> str:
    """The machine and the number type of a report, and how many inputs it skipped."""
    note = f"{report.target.dtype}, {report.machine}."
    if intervals:
        note = f"95 % bootstrap intervals over inputs. {note}"
    if report.data.skipped:
        note += f" {len(report.data.skipped)} inputs skipped."
    return note


def note(report: Report, intervals: bool) -> str:
    """How to read the table."""
    text = machine_note(report, intervals)
    if any(run.lossy for run in report.runs):
        text += f" {LOSSY}: the output is not the target's own."
    if any(run.batches for run in report.runs):
        text += " Speedup: over plain decoding at the same batch size."
    if report.mode == "teacher-forced":
        text += " Teacher-forced: acceptance along the target's own outputs; nothing is timed."
        if any(run.sampling.get("temperature", 0.0) > 0.0 for run in report.runs):
            text += " Sampled: expected, averaged over all prefixes."
    return text


def _main_table(report: Report, intervals: bool) -> Table:
    table = new_table(f"{report.target.path} on {report.data.path}, {report.data.prompts} inputs")
    table.caption = note(report, intervals)
    facts, after, columns = _facts(report), _facts_after(report), main_columns(report)
    longest = LONGEST_NAME if intervals else SHORTENED_NAME
    if not intervals:
        columns = [column for column in columns if column.metric in NARROW]
    table.add_column("method", no_wrap=True)
    for title in facts:
        table.add_column(title, justify="right")
    for column in columns:
        table.add_column(column.heading, justify="right")
    for title in after:
        table.add_column("\n".join(title.split(", ")), justify="right")
    rows = report_rows(report)
    for place, row in enumerate(rows):
        mark = (f" {LOSSY}", "bold yellow") if row.run.lossy else ""
        following = rows[place + 1 :]
        table.add_row(
            Text.assemble("\n ".join(wrap(row.name, longest)), mark),
            *(cell(row) for cell in facts.values()),
            *metric_cells(row, columns, intervals),
            *(cell(row) for cell in after.values()),
            end_section=bool(row.result and following and following[0].run is not row.run),
        )
    return table


def _plain_table(report: Report, intervals: bool) -> tuple[list[str], list[list[str]]]:
    facts, after, columns = _facts(report), _facts_after(report), main_columns(report)
    header = ["method", *facts, *(column.title for column in columns), *after]
    rows = [
        [
            f"{row.name} ({LOSSY})" if row.run.lossy else row.name,
            *(cell(row) for cell in facts.values()),
            *(plain_cell(row, column, intervals) for column in columns),
            *(cell(row) for cell in after.values()),
        ]
        for row in report_rows(report)
    ]
    return header, rows


def _facts(report: Report) -> dict[str, Callable[[Row], str]]:
    """The columns before the metrics: settings, tree sizes, parameters, batch size."""
    found: dict[str, Callable[[Row], str]] = {
        name: lambda row, name=name: _shown(row.run.settings.get(name))
        for name in setting_names(report)
    }
    if _has_trees(report):
        for size, title in (("depth", "levels"), ("nodes", "nodes")):
            found[title] = lambda row, size=size: _shown(row.run.sizes.get(size))
    if report.mode == "teacher-forced":
        found["parameters"] = lambda row: _shown_count(row.run.parameters)
    if any(run.batches for run in report.runs):
        found["batch"] = lambda row: _shown(row.result and row.result.batch_size)
    return found


def _facts_after(report: Report) -> dict[str, Callable[[Row], str]]:
    """The columns after the metrics."""
    found: dict[str, Callable[[Row], str]] = {}
    if report.mode == "teacher-forced":
        found["by position, %"] = _positions
    results = [result for run in report.runs for result in run.batches]
    if results:
        found["other tokens"] = _differing
    if any(result.memory_bytes is not None for result in results):
        found["memory, MB"] = lambda row: (
            f"{row.result.memory_bytes / 1e6:,.1f}"
            if row.result is not None and row.result.memory_bytes is not None
            else "–"
        )
    return found


def _positions(row: Row) -> str:
    """Conditional acceptance at each position of the draft."""
    rates = row.run.acceptance_rate_per_position
    shown = [] if rates is None else rates.conditional
    cells = ["–" if rate is None else f"{100 * rate.value:.0f}" for rate in shown]
    return " ".join(cells[:POSITIONS] + ["…"] * (len(cells) > POSITIONS)) or "–"


def _differing(row: Row) -> str:
    """Outputs whose tokens differ from those at batch size 1."""
    result = row.result
    if result is None or result.differing is None or result.batch_size == 1:
        return "–"
    text = f"{result.differing} of {row.run.totals['prompts']}"
    if result.parity is not None and not result.parity.holds:
        text += f", {result.parity.unexplained} NOT ties"
    return text


def _names(report: Report) -> list[str]:
    """The runs' names without what columns say; whole names where these would not tell apart."""
    facts = _facts(report)
    short = [
        " ".join(NUMBERS.sub("", run.name).split()) if _is_generated(run) else run.name
        for run in report.runs
    ]
    told = [
        (name, *(cell(Row(run, name, {})) for cell in facts.values()))
        for run, name in zip(report.runs, short, strict=True)
    ]
    return short if len(set(told)) == len(told) else [run.name for run in report.runs]


def _is_generated(run: Run) -> bool:
    """Whether the run's name was put together from its parts; names that users gave stay whole."""
    stop, verifier = run.stop or "", run.verifier or ""  # DRAFTER STOP VERIFIER
    whole = run.name.endswith(verifier) and stop in run.name
    return run.kind == "method" and whole and not (stop and run.name.startswith(stop))


def _has_trees(report: Report) -> bool:
    chains = ("chain", "cascade")
    return any(run.kind == "method" and run.method not in chains for run in report.runs)


def _card(size: int, row: Row) -> Card:
    speed, times = row.metrics["tokens_per_second"], row.metrics["speedup"]
    detail = f"{speed.value:,.0f} tokens/s, {times.value:.2f}× plain decoding"
    if times.low < times.high:
        detail += f" ({SPEEDUP.interval(times)})"
    return Card(f"fastest, batch size {size}", row.run.name, detail)


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shown_count(count: int | None) -> str:
    """A number of parameters in three digits."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count is not None and count >= scale:
            return f"{count / scale:.3g} {unit}"
    return _shown(count)
