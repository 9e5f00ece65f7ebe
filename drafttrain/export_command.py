"""Export a drafter with its head, policy and model card, and say what was written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from drafttrain.config import ConfigError, ExportConfig
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.report import DataFacts, read_report
from drafttrain.evaluation.tables import markdown, markdown_table, parity_lines, plain_cell
from drafttrain.evaluation.tune_report import read_tune_report
from drafttrain.evaluation.tune_tables import COLUMNS, cost_lines, main_policies, verdict_lines
from drafttrain.export.folder import check_destination, write_export
from drafttrain.export.model_card import Card, Measured, describe_policy, write_card
from drafttrain.export.parts import Parts, load_parts
from drafttrain.models.spec_drafter import SpecDrafter


def export(settings: ExportConfig) -> None:
    """Check, load, write, verify; print where it lies and how it is used.

    Raises ValueError, before anything is written, for parts that do not go together.
    """
    check_destination(settings.out, settings.force)
    measured = None if settings.report is None else read_measured(settings.report)
    parts = load_parts(settings)
    card = Card(str(settings.out), settings.target or recorded_target(parts), measured)
    write_export(settings.out, parts, write_card(card, parts), settings.force)
    print(summary(settings, parts))


def read_measured(file: Path) -> Measured:
    """What a model card shows of a report of `drafttrain eval` or `drafttrain tune`.

    Raises ValueError for a file that is neither.
    """
    if not file.is_file():
        raise ConfigError(
            f"report = {str(file)!r}: no such file; `drafttrain eval --report FILE` writes one"
        )
    try:
        tuned = "costs" in json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(
            f"report = {str(file)!r} is no JSON; give the report.json of `drafttrain eval`, or the "
            "tune.json of `drafttrain tune`"
        ) from None
    return _measured_by_tune(file) if tuned else _measured_by_eval(file)


def _measured_by_eval(file: Path) -> Measured:
    report = read_report(file)
    notes = [
        "95 % bootstrap intervals over the prompts; `plain` is the target alone in the same "
        "engine, `generate` Transformers' own",
        *parity_lines(report),
    ]
    return _measured(markdown_table(report), notes, report.data, report.environment)


def _measured_by_tune(file: Path) -> Measured:
    report = read_tune_report(file)
    rows = [
        [policy.name, *[plain_cell(policy, column, intervals=True) for column in COLUMNS]]
        for policy in main_policies(report)
    ]
    table = markdown(["policy", *[column.title for column in COLUMNS]], rows)
    notes = [
        "logged drafts replayed under every stop policy, speeds modelled with the costs below; "
        "95 % bootstrap intervals over the prompts; the oracle sees the target and is out of reach",
        *cost_lines(report),
        *verdict_lines(report),
    ]
    return _measured(table, notes, report.reported.data, report.environment)


def _measured(
    table: str, notes: Sequence[str], data: DataFacts, environment: Environment
) -> Measured:
    versions = [f"{name} {environment.versions[name]}" for name in ("torch", "transformers")]
    machine = environment.gpu or f"{environment.cores} cores of {environment.cpu}"
    return Measured(
        table=table,
        notes=[note.strip() for note in notes],
        command=environment.command,
        data=f"{data.prompts:,} prompts of `{data.path}`",
        machine=f"{machine}, {environment.threads} threads, {', '.join(versions)}",
        date=environment.date[:10],
    )


def recorded_target(parts: Parts) -> str | None:
    """The target's name, as the head or a Spec-Drafter recorded it."""
    target = parts.head.config.target if parts.head is not None else None
    if target is None and isinstance(parts.drafter, SpecDrafter):
        target = parts.drafter.config.target
    return None if target is None else target.get("path")


def summary(settings: ExportConfig, parts: Parts) -> str:
    """What was written, one thing a line."""
    out, drafter = settings.out, parts.drafter
    lines = [
        f"{out}: reloaded, every part equal to the original",
        f"drafter  {drafter.config.model_type}, {drafter.num_parameters():,} parameters",
        f"policy   {describe_policy(parts.policy)}",
        f"use      target.generate(..., assistant_model=drafter, custom_generate={str(out)!r}, "
        "trust_remote_code=True)",
        f"more     {out / 'README.md'}",
    ]
    return "\n".join(lines)
