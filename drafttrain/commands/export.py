"""Export a drafter with its head, policy and model card, and say what was written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drafttrain.config.base import ConfigError
from drafttrain.config.command_line import describe_command
from drafttrain.config.commands import ExportConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.recipes import CausalDrafterRecipe, ShallowDecoderRecipe
from drafttrain.config.runs import Run, head_folders, run_of
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.tokens import tokenize_prompts
from drafttrain.evaluation.batches.tables import batch_sizes, markdown_batches, markdown_lengths
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.report import DataFacts, plot_path, read_report
from drafttrain.evaluation.stops.report import read_tune_report
from drafttrain.evaluation.stops.tables import COLUMNS, cost_lines, main_policies, verdict_lines
from drafttrain.evaluation.table_style import markdown, plain_cell
from drafttrain.evaluation.tables import markdown_table, parity_lines
from drafttrain.export.folder import check_destination, write_export
from drafttrain.export.model_card import (
    Card,
    Measured,
    describe_policy,
    describe_verifier,
    write_card,
)
from drafttrain.export.parts import Parts, load_parts, programs
from drafttrain.export.provenance import Provenance
from drafttrain.export.push import check_push, push
from drafttrain.export.reload import Verification
from drafttrain.export.verify import INPUTS, Check, Reload, in_fresh_process
from drafttrain.models.drafters import check_fit, read_drafter_settings
from drafttrain.models.layout import count_parameters
from drafttrain.models.loading import check_target
from drafttrain.models.speech import shares_encoder


def export(settings: ExportConfig, reload: Reload = in_fresh_process) -> None:
    """Check, load, write, verify, push; print where it lies and how it is used.

    Raises ValueError, before anything is written, for parts that do not go together.
    """
    check_destination(settings.out, settings.force)
    run = run_of(settings.drafter)
    settings = fill_from_drafters_run(settings, run)
    measured = None if settings.report is None else read_measured(settings.report)
    plot = None if measured is None else measured.plot
    target = settings.target or recorded_target(settings)
    check_target_choice(settings, target)
    if settings.push is not None:
        check_push(settings.push)
    parts = replace(load_parts(settings), plot=plot)
    check = Check(some_inputs(settings, run, parts), target_to_decode(settings, target))
    made_from = Provenance(
        target=target,
        license=settings.license,
        target_license=settings.target_license,
        data=settings.training_data,
        data_license=settings.data_license,
    )
    card = Card(settings.push or str(settings.out), made_from, measured)
    found = write_export(
        settings.out,
        parts,
        lambda found: write_card(card, parts, found),
        check,
        reload,
        settings.force,
        settings.push,
    )
    print(summary(settings, parts, found))
    if settings.push is not None:
        print(f"pushed   {push(settings.out, settings.push, settings.private)}")


def fill_from_drafters_run(settings: ExportConfig, run: Run | None) -> ExportConfig:
    """What the run of a drafter knows, where the user gave nothing."""
    if run is None:
        return settings
    known: dict[str, object] = {"drafter": str(run.drafter)}
    if settings.report is None and (run.folder / "report.json").is_file():
        known["report"] = run.folder / "report.json"
    if settings.training_data is None:
        known["training_data"] = run.recipe.data.path
    token_by_token = isinstance(run.recipe, CausalDrafterRecipe | ShallowDecoderRecipe)
    if settings.num_assistant_tokens is None and token_by_token:
        known["num_assistant_tokens"] = run.recipe.drafter.k
    return settings.model_copy(update=known)


def recorded_target(settings: ExportConfig) -> str | None:
    """The target's name, as the head or a Spec-Drafter recorded it in its config.json."""
    places = [settings.head, *head_folders(settings.heads or Path()), Path(settings.drafter)]
    for place in places:
        file = None if place is None else Path(place) / "config.json"
        if file is None or not file.is_file():
            continue
        target = json.loads(file.read_text(encoding="utf-8")).get("target")
        if target and target.get("path"):
            return target["path"]
    return None


def check_target_choice(settings: ExportConfig, target: str | None) -> None:
    """Refuse a target that does not fit, from config.json alone. Raises ConfigError."""
    if settings.check == "target" and target is None:
        raise ConfigError(
            "check = 'target', but nobody recorded the drafter's target; add --target MODEL"
        )
    chosen = target_to_decode(settings, target)
    if chosen is not None:
        drafter = read_drafter_settings(settings.drafter)
        names = f"drafter {settings.drafter!r}", f"target {chosen.path!r}"
        check_fit(drafter, check_target(chosen), *names)


def target_to_decode(settings: ExportConfig, target: str | None) -> TargetConfig | None:
    """The target for the check; None where only drafts are compared."""
    if target is None or settings.check == "drafter":
        return None
    if settings.check == "auto" and not (Path(target) / "config.json").is_file():
        return None
    return TargetConfig(path=target)


def some_inputs(settings: ExportConfig, run: Run | None, parts: Parts) -> list[list[int]]:
    """Tokens of the first inputs of settings.data, or of the run's held-out rows.

    None, for random ones, where there are neither. Raises ConfigError for data that were given and
    cannot be read.
    """
    if shares_encoder(parts.drafter.config):
        return []  # it hears; encodings are made up for it
    data = settings.data
    if data is None:
        data = None if run is None else run.recipe.held_out
        if data is None or not Path(data.path).exists():
            return []
    rows = load_inputs(data.model_copy(update={"limit": min(data.limit or INPUTS, INPUTS)}))
    decoder_only = not parts.drafter.config.is_encoder_decoder
    return [ids for ids in tokenize_prompts(parts.tokenizer, rows, decoder_only) if ids]


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
    tables = [markdown_table(report), markdown_batches(report), markdown_lengths(report)]
    if batch_sizes(report):
        notes.insert(1, "the first table is of batch size 1, `batch` the most sequences at once")
    text = "\n".join(filter(None, tables))
    return _measured(file, text, notes, report.data, report.environment)


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
    return _measured(file, table, notes, report.reported.data, report.environment)


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


def summary(settings: ExportConfig, parts: Parts, found: Verification) -> str:
    """What was written, one thing a line."""
    out, drafter = settings.out, parts.drafter
    checked = f"every part equal to the original, drafts for {found.drafted} inputs too"
    if found.decoded:
        checked += f"; the target's output unchanged for {found.decoded} inputs"
    use = (
        f"custom_generate={settings.push or str(out)!r}, trust_remote_code=True)"
        if "custom_generate" in programs(drafter.config)
        else f"assistant_model=AutoModelForCausalLM.from_pretrained({settings.push or str(out)!r}))"
    )
    lines = [
        f"{out}: reloaded in a fresh process, {checked}",
        f"drafter  {drafter.config.model_type}, {count_parameters(drafter):,} parameters",
        f"policy   {describe_policy(parts.policy)}; {describe_verifier(parts.policy)}",
        f"use      target.generate(..., {use}",
        f"more     {out / 'README.md'}",
    ]
    if settings.license is None:
        lines.append("licence  not stated: give license=..., and target_license=, data_license=")
    return "\n".join(lines)
