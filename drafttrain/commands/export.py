"""`drafttrain export`: writes a drafter with its head, policy and model card."""

import shlex
from dataclasses import replace
from pathlib import Path
from textwrap import indent

from drafttrain.config.base import ConfigError, counted
from drafttrain.config.command_line import describe_command, without_folders
from drafttrain.config.commands import ExportConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.policy import POLICY
from drafttrain.config.recipes import CausalDrafterRecipe
from drafttrain.config.runs import TrainedRun, head_folders, recorded_target, run_of
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.tokens import tokenize_prompts
from drafttrain.evaluation.report import read_report
from drafttrain.evaluation.tables import main_table, note, parity_lines, verdict_lines
from drafttrain.export.engines import check_engines, engines_for
from drafttrain.export.folder import check_destination, check_name, write_export
from drafttrain.export.model_card import (
    Measured,
    describe_policy,
    describe_verifier,
    folder_of,
    serving_of,
    write_card,
)
from drafttrain.export.parts import Parts, load_parts
from drafttrain.export.verify import INPUTS, Check, Reload, Verification, in_fresh_process
from drafttrain.models.drafters import check_drafter, check_tokenizers, read_drafter_settings
from drafttrain.models.loading import check_target


def export(settings: ExportConfig, reload: Reload = in_fresh_process) -> None:
    """Checks, loads, writes and verifies an export; prints its contents and how to use it.

    Raises ValueError, before anything is written, for parts that do not fit each other.
    """
    check_destination(settings.out, settings.force)
    run = run_of(settings.drafter)
    settings = fill_from_drafters_run(settings, run)
    made_for = [*(head_folders(settings.head) if settings.head else ()), Path(settings.drafter)]
    known = next(filter(None, map(recorded_target, made_for)), None)
    target = settings.target or (known and TargetConfig(**known))
    measured = None if settings.report is None else read_measured(settings.report, target)
    config = read_drafter_settings(settings.drafter)
    check_engines(settings.engines, settings.drafter, config, target)
    decoded = check_target_choice(settings, target)
    if settings.hub is not None:
        check_name(settings.hub, "hub")
    parts = replace(load_parts(settings), plot=None if measured is None else measured.plot)
    resolved = settings.model_copy(update={"target": target})
    verification = write_export(
        settings.out,
        parts,
        lambda verification: write_card(resolved, measured, parts, verification),
        Check(held_out_inputs(run, parts), decoded),
        reload,
        settings.force,
    )
    print(summary(settings, parts, verification))
    serving = serving_of(folder_of(settings), target and target.path, parts)
    for engine in engines_for(settings.engines, config) if settings.engines else ():
        print(f"\n{engine.title}:\n{indent(engine.command(serving), '  ')}")


def fill_from_drafters_run(settings: ExportConfig, run: TrainedRun | None) -> ExportConfig:
    """Fills settings that the user did not give from the drafter's folder and its training run:
    policy, report, training data, and the draft length of a causal drafter without a policy."""
    known: dict[str, object] = {}
    if run is not None:
        known["drafter"] = str(run.drafter)
        if settings.report is None and (run.folder / "report.json").is_file():
            known["report"] = run.folder / "report.json"
        if settings.training_data is None:
            known["training_data"] = run.recipe.data.path
    if settings.policy is None and settings.head is None:
        policy = Path(str(known.get("drafter", settings.drafter))) / POLICY
        if policy.is_file():
            known["policy"] = policy
        elif run is not None and isinstance(run.recipe, CausalDrafterRecipe):
            known["num_assistant_tokens"] = settings.num_assistant_tokens or run.recipe.drafter.k
    return settings.model_copy(update=known)


def check_target_choice(settings: ExportConfig, target: TargetConfig | None) -> TargetConfig | None:
    """Returns the target to decode with when verifying; None if only drafts are compared.

    Raises ConfigError if a target is required but unknown, or does not fit the drafter.
    """
    if target is None:
        if settings.check == "target":
            raise ConfigError("check = 'target', but the drafter names none; add --target MODEL")
        return None
    here = (Path(target.path) / "config.json").is_file()
    decoded = settings.check == "target" or (settings.check == "auto" and here)
    if settings.target is not None:  # a recorded target may have been moved
        check_target(target)
    if decoded:
        check_drafter(settings.drafter, target, check_target(target))
        check_tokenizers(target, settings.drafter)
    return target if decoded else None


def held_out_inputs(run: TrainedRun | None, parts: Parts) -> list[list[int]]:
    """Returns the tokens of the run's first held-out rows; empty if there is no such data."""
    data = None if run is None else run.recipe.held_out
    if data is None or not Path(data.path).exists():
        return []
    rows = load_inputs(data.model_copy(update={"limit": min(data.limit or INPUTS, INPUTS)}))
    decoder_only = not parts.drafter.config.is_encoder_decoder
    tokenized = tokenize_prompts(parts.tokenizer, rows, decoder_only)
    return [ids for ids in tokenized if isinstance(ids, list)]


def summary(settings: ExportConfig, parts: Parts, verification: Verification) -> str:
    """Returns the lines that describe the written export."""
    out, drafter = settings.out, parts.drafter
    checked = "every part equal to the original"
    if verification.drafted:
        checked += f", drafts for {counted(verification.drafted, 'input')} too"
    if verification.decoded:
        checked += f"; the target's output unchanged for {counted(verification.decoded, 'input')}"
    use = f"custom_generate={folder_of(settings)!r}, trust_remote_code=True)"
    lines = [
        f"{out}: reloaded in a new process, {checked}",
        f"drafter  {drafter.config.model_type}, {drafter.num_parameters():,} parameters",
        f"policy   {describe_policy(parts.policy)}; {describe_verifier(parts.policy)}",
        f"use      target.generate(..., {use}",
        f"more     {out / 'README.md'}",
    ]
    if settings.hub is not None:
        lines.append(f"upload   hf upload {settings.hub} {out}")
    if settings.license is None:
        lines.append("licence  not stated: give license=...")
    return "\n".join(lines)


def read_measured(file: Path, target: TargetConfig | None) -> Measured:
    """Returns the results for a model card from a report of `drafttrain eval` or `tune`.

    A note names the report's target if it is not the drafter's, which may have been moved.
    """
    report = read_report(file)
    notes = [
        f"{note(report)} `plain` is the target without a drafter in the same engine, `generate` is "
        "Transformers'",
        *parity_lines(report),
        *verdict_lines(report),
    ]
    if target is not None and (name := Path(report.target.path).name) != Path(target.path).name:
        notes.insert(0, f"measured with target {name!r}, not {Path(target.path).name!r}")
    data, environment, plot = report.data, report.environment, file.with_suffix(".png")
    versions = [f"{name} {environment.versions[name]}" for name in ("torch", "transformers")]
    machine = environment.gpu or f"{environment.cores} cores of {environment.cpu}"
    return Measured(
        table=main_table(report).markdown(),
        notes=[line.strip() for line in notes],
        command=describe_command(shlex.split(environment.command)),
        data=f"{counted(data.prompts, 'prompt')} of `{without_folders(data.path)}`"
        + ("" if data.columns is None else f", {data.columns}"),
        machine=f"{machine}, {counted(environment.threads, 'thread')}, {', '.join(versions)}",
        date=environment.date[:10],
        plot=plot if plot.is_file() else None,
    )
