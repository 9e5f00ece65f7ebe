"""Train acceptance heads for a drafter (SpecDec++, Huang et al. 2024).

    accelerate launch recipes/train_acceptance_head.py
    accelerate launch recipes/train_acceptance_head.py --config recipes/gsm8k_heads.yaml \\
        heads.depths=[3] heads.rejection_weights=[6.0] run=checkpoints/mine

A head learns how likely the target is to accept a drafted token, from a state of the drafter: what
is known when the token is drawn (default), or the hidden state at its own position, a pass later
(cache.state=token, the paper's). All depths and rejection weights asked for are trained together,
on one reading of the cache. Missing outputs of the target and a missing cache are made first.
Running the same command again goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from accelerate import Accelerator
from torch import Tensor
from transformers import PretrainedConfig

from drafttrain.commands.shell import recipe_command
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import CacheConfig, DistillConfig
from drafttrain.config.reading import load_settings, validate_settings
from drafttrain.config.recipes import HeadRecipe
from drafttrain.data.batches.head_batches import CachedRows, whole_batch
from drafttrain.data.distill.distill import distill
from drafttrain.data.distill.plan import DistillPlan, check_distillation, plan_distillation
from drafttrain.data.hidden.cache import build_cache
from drafttrain.data.hidden.plan import SLOTS_SEEN, kept_share, plan_cache, state_of
from drafttrain.data.shards.outputs import MANIFEST, read_manifest
from drafttrain.data.shards.states import CacheManifest, HiddenCache, open_cache
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.draft_states import state_size
from drafttrain.models.drafters import check_drafter, load_drafter_beside
from drafttrain.models.loading import check_target, load_target
from drafttrain.training.loop import Task, count_steps, make_accelerator, make_plan, train
from drafttrain.training.losses import acceptance_loss, binary_kl
from drafttrain.training.objectives.head_sweep import HeadSweep, make_heads
from drafttrain.training.run import check_run, is_finished, open_run, save_heads

ROWS_AT_ONCE = 64
"""Held-out rows that validation reads at a time."""


@recipe_command
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings")] = None,
    config: Annotated[Path, typer.Option(help="YAML settings")] = Path(
        "recipes/functions_heads.yaml"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, steps, disk and memory; write nothing")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks")] = False,
) -> None:
    settings = load_settings(HeadRecipe, config, overrides or ())
    drafter = check_settings(settings)
    if dry_run:
        print_plan(settings, drafter)
        return
    if is_finished(settings.run):
        print(f"{settings.run} is finished: its heads are in {settings.run / 'final'}")
        return
    check_run(settings.run, settings)
    for held_out in splits(settings):
        group = "held_out" if held_out else "data"
        check_distillation(distill_settings(settings, held_out), group)
    accelerator = make_accelerator(settings.train, settings.run)
    if accelerator.is_main_process:
        open_run(settings.run, settings)
    accelerator.wait_for_everyone()
    cache, held_out = cached_rows(settings)
    task = make_task(settings, cache, held_out)
    accelerator.print(describe(task, cache))
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        print(f"saved {save_heads(settings.run, task.objective.cpu().model)}")


def check_settings(settings: HeadRecipe) -> PretrainedConfig:
    """Refuse settings and models that do not fit, before weights are read. -> the drafter's."""
    for name in ("depths", "rejection_weights"):
        if not getattr(settings.heads, name):
            raise ConfigError(f"heads.{name} is empty; give one value at least")
    if settings.train.precision != "fp32":
        raise ConfigError(
            f"train.precision = {settings.train.precision!r}: heads are trained in fp32; leave it "
            "out"
        )
    cache_settings(settings, held_out=False)
    distill_settings(settings, held_out=False)
    target = check_target(settings.target)
    drafter = check_drafter(settings.drafter, settings.target, target)
    state_of(cache_settings(settings, held_out=False), drafter)
    return drafter


def splits(settings: HeadRecipe) -> tuple[bool, ...]:
    """Training prompts (False), and held-out ones (True) where there are any."""
    return (False, True) if settings.held_out is not None else (False,)


def distill_settings(settings: HeadRecipe, held_out: bool) -> DistillConfig:
    data = settings.held_out if held_out else settings.data
    out = cache_settings(settings, held_out).distilled
    _refuse_clash("distill", settings.distill, ("target", "data", "out"))
    fixed = {"target": settings.target, "data": data, "out": out}
    return validate_settings(DistillConfig, fixed | settings.distill, within="distill")


def cache_settings(settings: HeadRecipe, held_out: bool) -> CacheConfig:
    """Of the training cache, or of the held-out prompts', which is always in the run's folder."""
    run = settings.run
    _refuse_clash("cache", settings.cache, ("target", "drafter"))
    values = {"distilled": run / "distilled", "out": run / "cache"} | settings.cache
    if held_out:
        values |= {"distilled": run / "held_out", "out": run / "held_out_cache", "mixes": 1}
    fixed = {"target": settings.target, "drafter": settings.drafter}
    return validate_settings(CacheConfig, fixed | values, within="cache")


def _refuse_clash(group: str, given: dict[str, Any], fixed: Sequence[str]) -> None:
    if clash := sorted(given.keys() & set(fixed)):
        raise ConfigError(f"{group}.{clash[0]}: give it as {clash[0]}= at the top level")


def cached_rows(settings: HeadRecipe) -> tuple[HiddenCache, HiddenCache | None]:
    """Hidden states and labels of the training and held-out prompts; made where missing.

    Raises ConfigError where a cache that is there was made otherwise or by other models.
    """
    target = load_target(settings.target)
    for held_out in splits(settings):
        distill(distill_settings(settings, held_out), target)
    drafter = load_drafter_beside(target, settings.drafter)
    for held_out in splits(settings):
        build_cache(cache_settings(settings, held_out), target, drafter)
    caches = [open_cache(cache_settings(settings, held_out).out) for held_out in splits(settings)]
    return caches[0], caches[1] if len(caches) > 1 else None


def identity(manifest: CacheManifest) -> dict[str, Any]:
    """Which drafter, target and decoding the heads are for, written to their config.json."""
    return {
        "state": manifest.state,
        "drafter": manifest.drafter.model_dump(),
        "target": manifest.target.model_dump(),
        "sampling": manifest.sampling,
        "mixing": manifest.mixing,
        "drafttrain_version": version("drafttrain"),
    }


def make_task(settings: HeadRecipe, cache: HiddenCache, held_out: HiddenCache | None) -> Task:
    manifest = cache.manifest
    heads = make_heads(
        settings.heads,
        manifest.hidden_size,
        settings.train.seed,
        manifest.mean_acceptance,
        **identity(manifest),
    )
    sweep, rows = HeadSweep(heads), CachedRows(cache)
    validate = Validation(held_out) if held_out is not None else None
    return Task(sweep, rows, rows.lengths(), whole_batch, validate, sweep.parts)


@dataclass(frozen=True)
class Validation:
    """Binary KL to the labels, weighted loss, and mean prediction of every head, on held-out rows.

    A head that is calibrated predicts the mean label on average; only w_rej = 1 aims at that.
    """

    cache: HiddenCache

    def __call__(self, sweep: HeadSweep) -> dict[str, float]:
        heads = sweep.parts
        sums = {name: torch.zeros(4, dtype=torch.float64) for name in heads}
        labels, positions = 0.0, 0
        rows = range(len(self.cache.row_numbers))
        for start in range(0, len(rows), ROWS_AT_ONCE):
            hidden, acceptance = self.cache.read(0, rows[start : start + ROWS_AT_ONCE])
            labels, positions = labels + float(acceptance.sum()), positions + len(acceptance)
            for name, head in heads.items():
                sums[name] += head_sums(head, hidden.to(head.device), acceptance.to(head.device))
        found = {"mean_acceptance": labels / positions}
        for name, (kl, loss, weight, predicted) in sums.items():
            found |= {
                f"held_out_kl/{name}": float(kl / positions),
                f"held_out_loss/{name}": float(loss / weight),
                f"mean_predicted/{name}": float(predicted / positions),
            }
        return found | {"best_kl": min(found[f"held_out_kl/{name}"] for name in heads)}


def head_sums(head: AcceptanceHead, hidden: Tensor, acceptance: Tensor) -> Tensor:
    """Sums over positions of binary KL, loss, its weight, and prediction. Shapes: -> [4]."""
    logits = head(hidden)
    losses, weights = acceptance_loss(logits, acceptance, head.config.rejection_weight)
    each = (binary_kl(logits, acceptance), losses, weights, logits.sigmoid())
    return torch.stack([values.double().sum() for values in each]).cpu()


def describe(task: Task, cache: HiddenCache) -> str:
    parameters = sum(p.numel() for p in task.objective.parameters())
    manifest = cache.manifest
    return (
        f"{len(task.parts)} heads of {parameters:,} parameters together; "
        f"{len(cache.row_numbers):,} rows, {sum(manifest.counts):,} positions in "
        f"{manifest.mixes} mixes, mean acceptance {manifest.mean_acceptance:.3f}"
    )


def print_plan(settings: HeadRecipe, drafter: PretrainedConfig) -> None:
    """What a run would do, without loading weights or writing anything."""
    with torch.device("meta"):
        cache = cache_settings(settings, held_out=False)
        width = state_size(drafter, state_of(cache, drafter))
        heads = make_heads(settings.heads, width, settings.train.seed)
    parameters = sum(head.num_parameters() for head in heads)
    distillation = plan_distillation(distill_settings(settings, held_out=False))
    rows, positions, disk = distillation.rows, *plan_positions(cache, drafter, distillation)
    lengths = np.full(rows, max(1, positions // max(rows, 1)))
    plan = make_plan(Task(heads[0], None, lengths, whole_batch), settings.train)
    world = Accelerator().num_processes
    steps = count_steps(plan, settings.train, world)
    keep = max(settings.train.keep_checkpoints, settings.train.average)
    mib = 2**20
    print(f"heads        {len(heads)}, {parameters:,} parameters together")
    print(f"distillation {distillation}")
    print(f"cache        about {positions:,} positions in each of {cache.mixes} mixes")
    print(f"batches      {plan.batches_per_epoch:,} of {settings.train.batch_tokens:,} positions")
    print(f"steps        {steps:,} of {settings.train.accumulation * world} batches")
    print(
        f"disk         {disk / mib:,.0f} MiB for the cache, "
        f"{(keep * 16 + 4) * parameters / mib:,.0f} MiB for {keep} checkpoints"
    )
    print(
        f"memory       {16 * parameters / mib:,.0f} MiB for weights, gradients and optimizer; "
        "target and drafter are in memory only until the cache is made"
    )


def plan_positions(
    cache: CacheConfig, drafter: PretrainedConfig, distillation: DistillPlan
) -> tuple[int, int]:
    """Positions in each mix and bytes of the cache, estimated."""
    if (cache.distilled / MANIFEST).is_file() and read_manifest(cache.distilled).counts is not None:
        plan = plan_cache(cache)
        return max(1, plan.positions // cache.mixes), plan.disk_bytes
    rows, tokens = distillation.rows, distillation.target_tokens
    state = state_of(cache, drafter)
    if state == "slot":
        blocks = min(tokens, rows * (cache.blocks_per_row or tokens))
        positions = blocks * min(cache.k, SLOTS_SEEN)
    else:
        positions = round(tokens * (1 - kept_share(cache, state)))
    width = torch.finfo(getattr(torch, cache.dtype)).bits // 8
    return max(1, positions), positions * cache.mixes * (state_size(drafter, state) * width + 16)


if __name__ == "__main__":
    main()
