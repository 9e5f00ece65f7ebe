"""Export a drafter with its head, policy and model card, and say what was written."""

from __future__ import annotations

from pathlib import Path

from drafttrain.config import ConfigError, ExportConfig
from drafttrain.evaluation.report import read_report
from drafttrain.evaluation.tables import markdown_table, parity_lines
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
    """What a model card shows of a report of `drafttrain eval`. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(
            f"report = {str(file)!r}: no such file; `drafttrain eval --report FILE` writes one"
        )
    report = read_report(file)
    environment = report.environment
    versions = [f"{name} {environment.versions[name]}" for name in ("torch", "transformers")]
    machine = environment.gpu or f"{environment.cores} cores of {environment.cpu}"
    return Measured(
        table=markdown_table(report),
        notes=[
            "95 % bootstrap intervals over the prompts; `plain` is the target alone in the same "
            "engine, `generate` Transformers' own",
            *parity_lines(report),
        ],
        command=environment.command,
        data=f"{report.data.prompts:,} prompts of `{report.data.path}`",
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
