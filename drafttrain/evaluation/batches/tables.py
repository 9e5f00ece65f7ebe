"""Tables of batch sizes: every method at each, and the draft length that is best at each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from textwrap import wrap

from rich.table import Table
from rich.text import Text

from drafttrain.evaluation.report import BatchResult, Report, Run
from drafttrain.evaluation.table_style import (
    Column,
    FittedTable,
    add_metrics,
    markdown,
    metric_cells,
    new_table,
    plain_cell,
)

SPEEDUP = Column("speedup", "speed-up", suffix="×")
COLUMNS = (
    Column("ms_per_token", "ms a token"),
    Column("tokens_per_second", "tok/s", digits=0),
    SPEEDUP,
    Column("speedup_vs_generate", "vs generate", suffix="×"),
)
DIFFERING, MEMORY = "other tokens", "memory, MB"
LONGEST_NAME = 26
"""Columns of a terminal that a method's name takes; a longer one goes on in the next line."""
LENGTHS_TITLE = "Draft length by batch size"


@dataclass(frozen=True)
class Lengths:
    """Methods that differ in draft length alone."""

    name: str
    """Drafter and verifier, with what else they have in common."""
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class BestLength:
    """The draft length with the highest speed-up at a batch size."""

    k: int
    result: BatchResult

    @property
    def pays(self) -> bool:
        """Whether it is faster than plain decoding there."""
        return self.result.metrics["speedup"].value > 1.0


def batch_sizes(report: Report) -> list[int]:
    """The batch sizes that something was measured at; none where 1 is the only one."""
    return sorted({result.batch_size for run in report.runs for result in run.batches})


def batch_table(report: Report) -> FittedTable | None:
    """Every run at each of its batch sizes; None where 1 is the only one."""
    return FittedTable(partial(_batch_table, report)) if batch_sizes(report) else None


def lengths_table(report: Report) -> FittedTable | None:
    """The best draft length at each batch size; None without several lengths or batch sizes."""
    return FittedTable(partial(_lengths_table, report)) if _both_varied(report) else None


def markdown_batches(report: Report, intervals: bool = True) -> str:
    """The table of batch sizes for documents; empty where 1 is the only one."""
    if not batch_sizes(report):
        return ""
    columns = _columns(report)
    header = ["method", "batch", *[column.title for column in columns], *_more(report)]
    rows = [
        [run.name, str(result.batch_size)]
        + [plain_cell(result, column, intervals) for column in columns]
        + _facts(report, run, result)
        for run, result in _rows(report)
    ]
    return markdown(header, rows)


def markdown_lengths(report: Report, intervals: bool = True) -> str:
    """The table of draft lengths for documents; empty where there is nothing to choose."""
    if not _both_varied(report):
        return ""
    sizes = batch_sizes(report)
    rows = []
    for group in length_groups(report):
        best = best_lengths(group)
        rows.append([group.name, *[_length_cell(best.get(size), intervals) for size in sizes]])
    return markdown(["method", *[f"batch {size}" for size in sizes]], rows)


def length_groups(report: Report) -> list[Lengths]:
    """The methods of which several draft lengths were measured, by what they have in common."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in report.runs:
        if run.kind == "method" and "k" in run.settings and run.batches:
            others = tuple((name, v) for name, v in run.settings.items() if name != "k")
            groups.setdefault((run.method, run.drafter, run.verifier, others), []).append(run)
    return [
        Lengths(f"{runs[0].drafter} {runs[0].verifier}", tuple(runs))
        for runs in groups.values()
        if len({run.settings["k"] for run in runs}) > 1
    ]


def best_lengths(group: Lengths) -> dict[int, BestLength]:
    """The draft length with the highest speed-up over plain decoding, by batch size."""
    best: dict[int, BestLength] = {}
    for run in group.runs:
        for result in run.batches:
            found = best.get(result.batch_size)
            speedup = result.metrics["speedup"].value
            if found is None or speedup > found.result.metrics["speedup"].value:
                best[result.batch_size] = BestLength(int(run.settings["k"]), result)
    return best


def _both_varied(report: Report) -> bool:
    return len(batch_sizes(report)) > 1 and bool(length_groups(report))


def _rows(report: Report) -> Iterator[tuple[Run, BatchResult]]:
    return ((run, result) for run in report.runs for result in run.batches)


def _columns(report: Report) -> list[Column]:
    known = {name for _, result in _rows(report) for name in result.metrics}
    return [column for column in COLUMNS if column.metric in known]


def _more(report: Report) -> list[str]:
    """Headings of what is no estimate."""
    measured = any(result.memory_bytes is not None for _, result in _rows(report))
    return [DIFFERING, MEMORY] if measured else [DIFFERING]


def _facts(report: Report, run: Run, result: BatchResult) -> list[str]:
    """The cells below `_more`."""
    differing = "–"
    if result.differing is not None and result.batch_size > 1:
        differing = f"{result.differing} of {run.totals['prompts']}"
        if result.parity is not None and not result.parity.holds:
            differing += f", {result.parity.unexplained} NOT ties"
    memory = "–" if result.memory_bytes is None else f"{result.memory_bytes / 1e6:,.1f}"
    return [differing, memory][: len(_more(report))]


def _batch_table(report: Report, intervals: bool) -> Table:
    table = new_table("Batch sizes")
    table.caption = _caption(report)
    table.add_column("method")
    table.add_column("batch", justify="right")
    columns = _columns(report)
    add_metrics(table, columns)
    for heading in _more(report):
        table.add_column("\n".join(heading.split(", ")), justify="right")
    for run in report.runs:
        for place, result in enumerate(run.batches):
            name = "\n ".join(wrap(run.name, LONGEST_NAME)) if place == 0 else ""
            cells = metric_cells(result, columns, intervals)
            facts = _facts(report, run, result)
            last = place == len(run.batches) - 1
            table.add_row(Text(name), str(result.batch_size), *cells, *facts, end_section=last)
    return table


def _lengths_table(report: Report, intervals: bool) -> Table:
    table = new_table(LENGTHS_TITLE)
    table.caption = "The fastest draft length, with its speed-up over plain decoding."
    table.add_column("method")
    sizes = batch_sizes(report)
    for size in sizes:
        table.add_column(f"batch {size}", justify="right")
    for group in length_groups(report):
        best = best_lengths(group)
        cells = [_length_text(best.get(size), intervals) for size in sizes]
        table.add_row(group.name, *cells)
    return table


def _length_text(best: BestLength | None, intervals: bool) -> Text:
    if best is None:
        return Text("–", style="dim")
    estimate = best.result.metrics["speedup"]
    text = Text(f"{best.k}: {SPEEDUP.number(estimate.value)}", style="" if best.pays else "dim")
    if intervals and estimate.low < estimate.high:
        text.append(f"\n{SPEEDUP.interval(estimate)}", style="dim")
    return text


def _length_cell(best: BestLength | None, intervals: bool) -> str:
    return "–" if best is None else f"{best.k}: {plain_cell(best.result, SPEEDUP, intervals)}"


def _caption(report: Report) -> str:
    note = (
        "ms a token: median over sequences, from entering to their end. tok/s, speed-up: of whole "
        f"waves, over plain decoding at the same batch size. {DIFFERING}: than at batch size 1."
    )
    if report.memory == "resident":
        note += " Memory: growth of the process's resident memory in a wave, which is coarse."
    if report.memory == "allocated":
        note += " Memory: most allocated on the device in a wave, the models apart."
    return note
