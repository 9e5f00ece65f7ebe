"""The tables of a report, defined once for the terminal, Markdown and the HTML page.

A row is a method at a batch size. Settings that differ between methods (k, h, beta, tau, tree
sizes) are columns, and so are the metrics that some row has. A report of `tune` also has tables of
all candidates and of the calibration of heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich import table as rich
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from drafttrain.config.base import counted
from drafttrain.config.sweep import SWEEPABLE
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.report import Report, Run, standings
from drafttrain.evaluation.runner import PLAIN

LOG_WIDTH = 132
"""Output width if stdout is not a terminal, for example a log file."""
LONGEST_NAME, SHORTENED_NAME = 26, 18
"""Widths at which row names wrap with and without intervals; titles wrap at the second."""


@dataclass(frozen=True)
class Column:
    """A column of a table: the value it takes from a row and its format."""

    title: str
    of: Callable[[Any], Estimate | float | int | str | None]
    digits: int = 2
    percent: bool = False
    suffix: str = ""
    narrow: bool = True
    """Whether it is shown in a terminal that is too narrow for all columns."""

    def number(self, value: float) -> str:
        shown = f"{100 * value if self.percent else value:,.{self.digits}f}{self.suffix}"
        return shown.replace("-", "−")

    def parts(self, row: object) -> tuple[str, str]:
        """Returns a row's value and interval as text; the interval is empty if there is none."""
        value = self.of(row)
        if isinstance(value, float):
            return self.number(value), ""
        if not isinstance(value, Estimate):
            return "–" if value is None else str(value), ""
        low, high = self.number(value.low), self.number(value.high)
        between = " to " if "−" in low else "–"
        interval = f"{low.removesuffix(self.suffix)}{between}{high}"
        return self.number(value.value), interval if value.low < value.high else ""


@dataclass(frozen=True)
class Table:
    """A table. Rich prints as much as the terminal has room for: all columns with intervals, else
    only the narrow ones with intervals, else these without."""

    title: str
    columns: Sequence[Column]
    """The first one names the row."""
    rows: Sequence[Any]
    note: str = ""
    """How to read it."""
    is_best: Callable[[Any], bool] = lambda row: False
    """Whether the page highlights a row."""

    def cells(self, row: object, intervals: bool = True) -> list[str]:
        """Returns a row's cells as text, with intervals in parentheses."""
        parts = [column.parts(row) for column in self.columns]
        return [f"{value} ({more})" if more and intervals else value for value, more in parts]

    def markdown(self, intervals: bool = True) -> str:
        """Returns the table in Markdown."""
        header = [column.title for column in self.columns]
        lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
        lines += [self.cells(row, intervals) for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[rich.Table]:
        every = range(len(self.columns))
        narrow = [index for index in every if self.columns[index].narrow]
        free = options.update(width=10 * LOG_WIDTH)
        for shown, intervals in ((every, True), (narrow, True), (narrow, False)):
            table = self._rich(shown, intervals)
            if Measurement.get(console, free, table).maximum <= options.max_width:
                break
        yield table

    def _rich(self, shown: Sequence[int], intervals: bool) -> rich.Table:
        """Returns a Rich table of some columns."""
        table = rich.Table(
            title=self.title,
            title_justify="left",
            caption=self.note,
            caption_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for index in shown:
            title = "\n".join(wrap(self.columns[index].title, SHORTENED_NAME))
            table.add_column(title, justify="right" if index else "left", no_wrap=not index)
        for row in self.rows:
            name, *cells = self.cells(row, intervals)
            width = LONGEST_NAME if intervals else SHORTENED_NAME
            cells = ["\n ".join(wrap(name, width)), *(one.replace(" (", "\n(") for one in cells)]
            table.add_row(*(Text(cells[index]) for index in shown))
        return table


def print_findings(tables: Sequence[Table], lines: Sequence[str], files: Sequence[str]) -> None:
    """Prints the tables, then the sentences, then the paths of the files."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    for table in tables:
        console.print(table)
    for line in (*lines, *files):
        console.print(line, highlight=False, markup=False, soft_wrap=line in files)


POSITIONS = 6
"""Maximal number of draft positions shown; report.json has all."""


def _metric(name: str, title: str, digits: int = 2, **how: bool | str) -> tuple[str, Column]:
    """Returns a metric's name and its column, for rows with `metrics`."""
    return name, Column(title, lambda row: row.metrics.get(name), digits, **{"narrow": False} | how)


METRICS = dict([
    _metric("mean_acceptance_length", "mean acceptance length", narrow=True),
    _metric("expected_accepted", "E(A)"),
    _metric("swi", "SWI"),
    _metric("mbsu", "MBSU"),
    _metric("greedy_match", "greedy match %", 1, percent=True, narrow=True),
    _metric("sampled_acceptance", "Σ min(p, q) %", 1, percent=True, narrow=True),
    _metric("first_choice_acceptance", "p(argmax q) %", 1, percent=True),
    _metric("identical", "equal %", 1, percent=True, narrow=True),
    _metric("bleu", "BLEU", 1),
    _metric("bleu_difference", "Δ BLEU to plain", narrow=True),
    _metric("consistency_bleu", "BLEU to plain", 1),
    _metric("wer", "word error %"),
    _metric("wer_difference", "Δ word error to plain", narrow=True),
    _metric("rtf", "real-time factor", 3),
    _metric("ms_per_token", "ms per token"),
    _metric("tokens_per_second", "tok/s", 0, narrow=True),
    _metric("speedup", "speedup", suffix="×", narrow=True),
    _metric("speedup_vs_fixed", "vs best fixed k", suffix="×"),
    _metric("speedup_vs_generate", "vs generate", suffix="×", narrow=True),
    _metric("speedup_vs_beam", "vs beam", suffix="×"),
])  # fmt: skip
CALIBRATION = {"binary_kl": "KL", "ece": "ECE", "auc": "AUC"}
CALIBRATION |= {"label_mean": "acceptance", "predicted_mean": "predicted"}


def main_table(report: Report) -> Table:
    """Returns the table of all runs: the method, the settings, and the metrics that are informative
    for this report; columns without any value are left out."""
    runs, forced = report.runs, report.mode == "teacher-forced"
    batches = len(report.batch_sizes) > 1
    trees = any(r.kind == "method" and r.method not in ("chain", "cascade") for r in runs)
    several = any(r.costs is not None and len(r.costs.calls) > 1 for r in runs)  # CS Drafting
    hidden = set() if several else {"swi"}
    if not (several or trees or forced):
        hidden.add("mbsu")
    if not any(run.lossy for run in runs):
        hidden |= {"bleu_difference", "consistency_bleu", "wer_difference"}
    if not batches:
        hidden.add("ms_per_token")
    columns = [Column("method", lambda run: f"{run.name} (lossy)" if run.lossy else run.name)]
    columns += [Column(name, partial(_setting, name), narrow=False) for name in SWEEPABLE]
    if trees:
        columns.append(Column("levels", lambda run: run.sizes.get("depth"), narrow=False))
        columns.append(Column("nodes", lambda run: run.sizes.get("nodes"), narrow=False))
    if forced:
        columns.append(Column("M parameters", lambda run: (run.parameters or 0) / 1e6, 1))
    if batches:
        columns.append(Column("batch", lambda run: run.batch_size))
    columns += [METRICS[name] for name in METRICS if name not in hidden]
    if forced:
        columns.append(Column("by position, %", _positions))
    columns.append(
        Column("memory, MB", lambda r: r.memory_bytes and r.memory_bytes / 1e6, 1, narrow=False)
    )
    best = [] if forced else list(winners(report).values())
    return Table(
        f"{report.target.path} on {report.data.path}, {counted(report.data.prompts, 'input')}",
        [one for one in columns if any(one.of(run) is not None for run in runs)],
        runs,
        note(report),
        lambda run: any(run is one for one in best),
    )


def _setting(name: str, run: Run) -> str | None:
    return f"{run.settings[name]:g}" if name in run.settings else None


def _positions(run: Run) -> str | None:
    """Returns the conditional acceptance rate at each draft position in percent, as text."""
    if (rates := run.acceptance_rate_per_position) is None:
        return None
    cells = ["–" if rate is None else f"{100 * rate.value:.0f}" for rate in rates.conditional]
    return " ".join(cells[:POSITIONS] + ["…"] * (len(cells) > POSITIONS))


def heading(report: Report) -> tuple[str, str]:
    """Returns a title (target and drafters) and a subtitle (prompts, data type, machine, date)."""
    methods = [run for run in report.runs if run.kind == "method"]
    drafters = dict.fromkeys(run.other or run.called or run.drafter or "" for run in methods)
    names = "; ".join(drafters) if report.search is None else report.search.drafter
    return (
        Path(report.target.path).name + (f" with {names}" if names else ""),
        f"{counted(report.data.prompts, 'prompt')} of {report.data.path}; {report.target.dtype}, "
        f"{report.machine}; {report.environment.date[:10]}",
    )


def note(report: Report) -> str:
    """Returns the note under the table: data type, machine, and explanations it needs."""
    text = f"95 % bootstrap intervals over inputs. {report.target.dtype}, {report.machine}."
    if report.partial:
        text += f" INTERRUPTED: {report.partial}."
    if report.data.skipped:
        text += f" {counted(len(report.data.skipped), 'input')} skipped."
    if report.data.cut_by_positions:
        cut = counted(report.data.cut_by_positions, "output")
        text += f" {cut} cut where the target's positions end."
    if too_long := max((run.totals.get("too_long", 0) for run in report.runs), default=0):
        text += f" {counted(too_long, 'input')} longer than the drafter takes: decoded plainly."
    if any(run.lossy for run in report.runs):
        text += " lossy: the output is not the target's own."
    if len(report.batch_sizes) > 1:
        text += " Speedup: over plain decoding at the same size. Equal: to batch size 1."
    if report.mode == "teacher-forced":
        text += " Teacher-forced: acceptance along the target's own outputs; nothing is timed."
        if any(run.sampling.get("temperature", 0.0) > 0.0 for run in report.runs):
            text += " Sampled: expected, averaged over all prefixes."
    return text


def winners(report: Report) -> dict[int, Run]:
    """Returns the best run at each batch size: the choice of `tune`, else the fastest of the
    methods and plain decoding. Untimed runs are not considered."""
    if report.search is not None:
        chosen = {one.batch_size: one.best for one in report.search.choices}
        return {size: report.run(name, size) for size, name in chosen.items()}
    able = [run for run in report.runs if run.kind != "baseline" and "speedup" in run.metrics]
    able.sort(key=lambda run: -run.metrics["speedup"].value)
    sizes = sorted({run.batch_size for run in able})
    return {size: next(run for run in able if run.batch_size == size) for size in sizes}


def parity_lines(report: Report) -> list[str]:
    """Returns sentences on the token-by-token comparisons of lossless runs: one for all runs that
    are equal to the same, and one for each with differences, which says whether rounding explains
    them. Above batch size 1 only those with differences."""
    equal, lines = {}, []
    for run in report.runs:
        batch = "" if run.batch_size == 1 else f", batch {run.batch_size}"
        for one in run.parity:
            words = f"{one.identical} of {one.compared} equal to {one.against}"
            if gaps := [difference.gap for difference in one.differences]:
                wrong = one.unexplained
                verdict = f"{wrong} are NOT ties: please report this" if wrong else "ties"
                lines.append(
                    f"{run.name}{batch}: {words}; at the first difference the top-2 logit gap is "
                    f"{min(gaps):.1e} to {max(gaps):.1e} ({verdict}, bound {one.bound:.2g})"
                )
            elif run.batch_size == 1:
                equal.setdefault(words, []).append(run.name)
    return [f"{words}: {'; '.join(names)}" for words, names in equal.items()] + lines


def search_tables(report: Report) -> list[Table]:
    """Returns the tables of `tune`: calibration of the heads, if any, and all candidates at each
    batch size with the results of their last rung."""
    search, tables = report.search, []
    if search is None:
        return []
    if search.heads:
        columns = [_metric(name, title, 3, narrow=True)[1] for name, title in CALIBRATION.items()]
        columns.insert(0, Column("head", lambda head: head.name))
        tables.append(Table("Acceptance heads on held-out draft tokens", columns, search.heads))
    columns = [
        Column("candidate", lambda row: row[0]),
        Column("prompts", lambda row: row[1][0].prompts),
        Column("tok/s", lambda row: row[1][1].tokens_per_second, 0),
        Column("against the fastest", lambda row: row[1][1].against_best, 3),
        Column("target calls per token", lambda row: row[1][1].verification_rate, 3),
        Column("discarded per token", lambda row: row[1][1].discard_rate, 3),
    ]
    for choice in search.choices:
        rows = list(standings(search.rungs, choice.batch_size).items())
        title = f"Candidates at batch size {choice.batch_size}"
        tables.append(
            Table(title, columns, rows, is_best=lambda row, best=choice.best: row[0] == best)
        )
    return tables


def verdict_lines(report: Report) -> list[str]:
    """Returns sentences on what `tune` chose and its speedup on the final prompts."""
    search, lines, lengths = report.search, [], []
    if search is None:
        return []
    for choice in search.choices:
        size, words = choice.batch_size, f"batch size {choice.batch_size}: {choice.best}"
        if choice.best == PLAIN:
            lines.append(f"{words}; no draft is faster than plain decoding")
        else:
            lines.append(f"{words}, {speedup_text(report.run(choice.best, size))}")
            for name in dict.fromkeys((choice.best_fixed, choice.best_head)):
                if name not in (None, choice.best):
                    lines.append(f"  {name}: {speedup_text(report.run(name, size))}")
        run = report.run(str(choice.best_fixed), size)
        if run.drafter == "causal":  # engines load causal drafters and draft chains of fixed length
            k = int(run.settings["k"]) if run.metrics["speedup"].value > 1.0 else 0
            lengths.append(f"{k} at batch size {size}")
    if lengths:
        shown = ", ".join(lengths)
        lines.append(f"vLLM num_speculative_tokens, llama.cpp --spec-draft-n-max: {shown}")
    tried = ", ".join(f"{rung.prompts}" for rung in search.rungs)
    threshold = f"; h by Theorem 3.1: {search.threshold:.3f}" if search.threshold else ""
    lines += [
        f"{1 + len(search.candidates)} candidates, compared after {tried} prompts of "
        f"{search.data.path}; the figures are of {report.data.prompts} other prompts; "
        f"{search.minutes:.1f} minutes",
        f"a draft token takes {1000 * search.t_draft:.2f} ms, a target call "
        f"{1000 * search.t_target:.2f} ms{threshold}",
    ]
    if search.oracle is not None:
        lines.append(
            "the oracle (SpecDec++ Lemma 2.1) discards nothing and makes "
            f"{search.oracle.target_calls / search.oracle.tokens:.2f} target calls per token"
        )
    return lines


def speedup_text(run: Run) -> str:
    """Returns a run's speedup and its interval in words."""
    value, interval = METRICS["speedup"].parts(run)
    return f"{value} plain decoding" + (f" ({interval})" if interval else "")
