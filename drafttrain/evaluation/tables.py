"""The tables and the page of a report.

A row is a method at a batch size. What differs between methods (k, h, beta, tau, tree sizes) are
columns, and so is every metric that some row has. A report of `tune` also shows all candidates and
the calibration of heads.
"""

from __future__ import annotations

from pathlib import Path

from drafttrain.config.sweep import SWEEPABLE
from drafttrain.evaluation.page import Card, Column, Page, Table
from drafttrain.evaluation.report import Parity, Report, Run
from drafttrain.evaluation.runner import PLAIN

POSITIONS = 6
"""Positions of a draft that the table has room for; report.json has them all."""


def _metric(name: str, title: str, digits: int = 2, **how: bool | str) -> tuple[str, Column]:
    """A column of anything that has metrics, by the metric's name."""
    return name, Column(title, lambda row: row.metrics.get(name), digits, **{"narrow": False} | how)


METRICS = dict(
    (
        _metric("mean_acceptance_length", "mean acceptance length", narrow=True),
        _metric("expected_accepted", "E(A)"),
        _metric("swi", "SWI"),
        _metric("mbsu", "MBSU"),
        _metric("greedy_match", "greedy match %", 1, percent=True, narrow=True),
        _metric("sampled_acceptance", "Σ min(p, q) %", 1, percent=True, narrow=True),
        _metric("first_choice_acceptance", "p(argmax q) %", 1, percent=True),
        _metric("identical", "equal %", 1, percent=True, narrow=True),
        _metric("bleu", "BLEU", 1),
        _metric("bleu_difference", "Δ BLEU to plain"),
        _metric("consistency_bleu", "BLEU to plain", 1),
        _metric("wer", "word error %"),
        _metric("wer_difference", "Δ word error to plain"),
        _metric("rtf", "real-time factor", 3),
        _metric("ms_per_token", "ms per token"),
        _metric("tokens_per_second", "tok/s", 0, narrow=True),
        _metric("speedup", "speedup", suffix="×", narrow=True),
        _metric("speedup_vs_generate", "vs generate", suffix="×", narrow=True),
        _metric("speedup_vs_beam", "vs beam", suffix="×"),
    )
)
CALIBRATION = {"binary_kl": "KL", "ece": "ECE", "auc": "AUC"}
CALIBRATION |= {"label_mean": "acceptance", "predicted_mean": "predicted"}


def main_table(report: Report) -> Table:
    """All runs by batch size, with the metrics that say something there."""
    facts = _facts(report)

    def name(run: Run) -> str:
        return f"{run.name} (lossy)" if run.lossy else run.name

    after = [Column("by position, %", _positions)] if report.mode == "teacher-forced" else []
    if len(report.batch_sizes) > 1:
        after.append(Column("other tokens", _differing))
    if any(run.memory_bytes for run in report.runs):
        after.append(Column("memory, MB", lambda run: (run.memory_bytes or 0) / 1e6, 1))
    best = [] if report.mode == "teacher-forced" else list(winners(report).values())
    return Table(
        f"{report.target.path} on {report.data.path}, {report.data.prompts} inputs",
        [Column("method", name), *facts, *(METRICS[one] for one in shown_metrics(report)), *after],
        report.runs,
        note(report),
        lambda run: any(run is one for one in best),
    )


def shown_metrics(report: Report) -> list[str]:
    """Metrics that are columns: those that some run has and that say something there."""
    found = {metric for run in report.runs for metric in run.metrics}
    if not any(run.lossy for run in report.runs):
        found -= {"bleu_difference", "consistency_bleu", "wer_difference"}
    several = any(run.costs is not None and len(run.costs.calls) > 1 for run in report.runs)
    if not several:  # drafters that call each other (CS Drafting)
        found -= {"swi"}
    if not (several or _has_trees(report) or report.mode == "teacher-forced"):
        found -= {"mbsu"}
    if len(report.batch_sizes) == 1:
        found -= {"ms_per_token"}
    return [name for name in METRICS if name in found]


def _facts(report: Report) -> list[Column]:
    """The columns before the metrics: settings that some method has, tree sizes, batch size."""
    found = [
        Column(
            name, lambda run, name=name: f"{run.settings[name]:g}" if name in run.settings else None
        )
        for name in SWEEPABLE
        if any(name in run.settings for run in report.runs)
    ]
    if _has_trees(report):
        found.append(Column("levels", lambda run: run.sizes.get("depth")))
        found.append(Column("nodes", lambda run: run.sizes.get("nodes")))
    if report.mode == "teacher-forced":
        found.append(Column("M parameters", lambda run: (run.parameters or 0) / 1e6, 1))
    if len(report.batch_sizes) > 1:
        found.append(Column("batch", lambda run: run.batch_size))
    return found


def _has_trees(report: Report) -> bool:
    chains = ("chain", "cascade")
    return any(run.kind == "method" and run.method not in chains for run in report.runs)


def _positions(run: Run) -> str | None:
    """Conditional acceptance at each position of the draft."""
    rates = run.acceptance_rate_per_position
    cells = [
        "–" if rate is None else f"{100 * rate.value:.0f}"
        for rate in (() if rates is None else rates.conditional)
    ]
    return " ".join(cells[:POSITIONS] + ["…"] * (len(cells) > POSITIONS)) or None


def _differing(run: Run) -> str | None:
    """Outputs whose tokens differ from those at batch size 1."""
    if run.differing is None:
        return None
    wrong = sum(parity.unexplained for parity in run.parity)
    text = f"{run.differing} of {run.totals['prompts']}"
    return f"{text}, {wrong} NOT ties" if wrong else text


def note(report: Report) -> str:
    """How to read the table, the machine and the number type."""
    text = f"95 % bootstrap intervals over inputs. {report.target.dtype}, {report.machine}."
    if report.data.skipped:
        text += f" {len(report.data.skipped)} inputs skipped."
    if any(run.lossy for run in report.runs):
        text += " lossy: the output is not the target's own."
    if len(report.batch_sizes) > 1:
        text += " Speedup: over plain decoding at the same batch size."
    if report.mode == "teacher-forced":
        text += " Teacher-forced: acceptance along the target's own outputs; nothing is timed."
        if any(run.sampling.get("temperature", 0.0) > 0.0 for run in report.runs):
            text += " Sampled: expected, averaged over all prefixes."
    return text


def winners(report: Report) -> dict[int, Run]:
    """At each batch size the choice of `tune`, else the fastest of the methods and plain decoding;
    none untimed."""
    if report.search is not None:
        chosen = {one.batch_size: one.best for one in report.search.choices}
        return {size: report.run(name, size) for size, name in chosen.items()}
    found: dict[int, Run] = {}
    for run in report.runs:
        best = found.get(run.batch_size)
        if run.kind == "baseline" or "speedup" not in run.metrics:
            continue
        if best is None or run.metrics["speedup"].value > best.metrics["speedup"].value:
            found[run.batch_size] = run
    return found


def parity_lines(report: Report) -> list[str]:
    """The results of comparing lossless runs token by token, one comparison a line; above batch
    size 1 those that differ."""
    lines = []
    for run in report.runs:
        for parity in run.parity:
            if run.batch_size == 1:
                lines.append(parity_line(run.name, parity))
            elif parity.differences:
                lines.append(parity_line(f"{run.name}, batch {run.batch_size}", parity))
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


def search_tables(report: Report) -> list[Table]:
    """Of `tune`: calibration of the heads on held-out draft tokens, if there are any, and all
    candidates at each batch size, in the last rung that decoded them."""
    search, tables = report.search, []
    if search is None:
        return []
    if search.heads:
        columns = [_metric(name, title, 3, narrow=True)[1] for name, title in CALIBRATION.items()]
        columns.insert(0, Column("head", lambda head: head.name))
        tables.append(Table("Acceptance heads on held-out draft tokens", columns, search.heads))
    columns = [
        Column("candidate", lambda row: row[0]),
        Column("prompts", lambda row: row[1]),
        Column("tok/s", lambda row: row[2].tokens_per_second, 0),
        Column("against the fastest", lambda row: row[2].against_best, 3),
        Column("target calls per token", lambda row: row[2].verification_rate, 3),
        Column("discarded per token", lambda row: row[2].discard_rate, 3),
    ]
    for choice in search.choices:
        standings = search.standings(choice.batch_size)
        rows = [(name, *found) for name, found in standings.items()]
        title = f"Candidates at batch size {choice.batch_size}"
        tables.append(
            Table(title, columns, rows, is_best=lambda row, best=choice.best: row[0] == best)
        )
    return tables


def verdict_lines(report: Report) -> list[str]:
    """What `tune` chose and what it is worth on the final prompts, a sentence each."""
    search, lines, lengths = report.search, [], []
    if search is None:
        return []
    for choice in search.choices:
        size, words = choice.batch_size, f"batch size {choice.batch_size}: {choice.best}"
        if choice.best == PLAIN:
            lines.append(f"{words}; no draft is faster than plain decoding")
        else:
            lines.append(f"{words}, {_speedup(report.run(choice.best, size))}")
            for name in dict.fromkeys((choice.best_fixed, choice.best_head)):
                if name not in (None, choice.best):
                    lines.append(f"  {name}: {_speedup(report.run(name, size))}")
        run = report.run(str(choice.best_fixed), size)
        if run.drafter == "causal":  # what engines load; they draft chains of fixed length
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


def _speedup(run: Run) -> str:
    column = METRICS["speedup"]
    value, interval = column.parts(run)
    return f"{value} plain decoding" + (f" ({interval})" if interval else "")


def report_page(report: Report, plot: bytes) -> Page:
    """What the HTML page of a report shows."""
    drafters = dict.fromkeys(run.drafter or "" for run in report.runs if run.kind == "method")
    names = ", ".join(drafters) if report.search is None else report.search.drafter
    cards = []
    for size, run in winners(report).items():
        speed, _ = METRICS["tokens_per_second"].parts(run)
        label = "fastest" if report.search is None else "chosen"
        detail = f"{speed} tokens/s, {_speedup(run)}"
        cards.append(Card(f"{label}, batch size {size}", run.name, detail))
    return Page(
        title=Path(report.target.path).name + (f" with {names}" if names else ""),
        subtitle=f"{report.data.prompts} prompts of {report.data.path}; {report.target.dtype}, "
        f"{report.machine}; {report.environment.date[:10]}",
        cards=cards,
        verdicts=[*parity_lines(report), *verdict_lines(report)],
        plot=plot,
        plot_text="The figures of the tables below",
        tables=[main_table(report), *search_tables(report)],
        notes=[note(report), f"Command: {report.environment.command}"],
    )
