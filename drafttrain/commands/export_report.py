"""What an export takes from a report: a table for the card, and draft lengths for commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drafttrain.config.command_line import describe_command
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.report import DataFacts, Report, plot_path, read_report
from drafttrain.evaluation.tables import markdown_table, parity_lines
from drafttrain.evaluation.tune_report import verdict_lines
from drafttrain.export.engines import Schedule
from drafttrain.export.model_card import Measured


def read_measured(file: Path) -> Measured:
    """What a model card shows of a report of `drafttrain eval` or `drafttrain tune`.

    Raises ValueError for a file that is neither.
    """
    report = read_report(file)
    notes = [
        "95 % bootstrap intervals over the prompts; `plain` is the target alone in the same "
        "engine, `generate` Transformers' own",
        *parity_lines(report),
    ]
    if report.search is not None:
        notes += verdict_lines(report)
    return _measured(file, markdown_table(report), notes, report.data, report.environment)


def read_draft_lengths(file: Path) -> tuple[int | None, Schedule]:
    """`fastest_length` and `fastest_lengths` of a report; what `tune` chose stands in policy.json.

    Raises ValueError as `read_measured`.
    """
    report = read_report(file)
    if report.search is not None:
        return None, ()
    return fastest_length(report), fastest_lengths(report)


def _measured(
    file: Path, table: str, notes: Sequence[str], data: DataFacts, environment: Environment
) -> Measured:
    plot = plot_path(file)
    versions = [f"{name} {environment.versions[name]}" for name in ("torch", "transformers")]
    machine = environment.gpu or f"{environment.cores} cores of {environment.cpu}"
    return Measured(
        table=table,
        notes=[note.strip() for note in notes],
        command=describe_command(environment.command.split(" ")),
        data=f"{data.prompts:,} prompts of `{data.path}`",
        machine=f"{machine}, {environment.threads} threads, {', '.join(versions)}",
        date=environment.date[:10],
        plot=plot if plot.is_file() else None,
    )


def fastest_length(report: Report) -> int | None:
    """The draft length k of a language model's chain that was the fastest, one sequence at once.

    None where none was timed: a teacher-forced report knows acceptance, not costs.
    """
    timed = [(metrics["speedup"].value, k) for k, metrics in _chains(report, 1)]
    return max(timed)[1] if timed else None


def fastest_lengths(report: Report) -> Schedule:
    """The same for every batch size up to each; none where it is everywhere the same.

    0 where plain decoding was faster than all of them.
    """
    schedule: list[tuple[int, int]] = []
    sizes = sorted({result.batch_size for run in report.runs for result in run.batches})
    for size in sizes:
        speed, k = max([(m["speedup"].value, k) for k, m in _chains(report, size)], default=(0, 0))
        k = k if speed > 1.0 else 0
        if schedule and schedule[-1][1] == k:
            schedule.pop()
        schedule.append((size, k))
    return schedule if len(schedule) > 1 else ()


def _chains(report: Report, size: int) -> list[tuple[int, dict[str, Estimate]]]:
    """Draft length and metrics of each timed chain of a language model at a batch size."""
    found = []
    for run in report.runs:
        k = run.sizes.get("k", run.settings.get("k"))
        if run.kind != "method" or run.method != "chain" or run.drafter != "causal" or not k:
            continue
        measured = [one.metrics for one in run.batches if one.batch_size == size]
        for metrics in measured or ([run.metrics] if size == 1 else []):
            if "speedup" in metrics:
                found.append((int(k), metrics))
    return found
