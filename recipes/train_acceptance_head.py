"""Train acceptance heads for a drafter (SpecDec++, Huang et al. 2024).

    accelerate launch recipes/train_acceptance_head.py
    accelerate launch recipes/train_acceptance_head.py --config recipes/gsm8k_heads.yaml \\
        heads.depths=[3] heads.rejection_weights=[6.0] run=checkpoints/mine

A head learns the probability that the target accepts a draft token from a state of the drafter:
what is known when the token is drawn (default), or the hidden state at the token's own position,
one forward pass later (cache.state=token, as in the paper). Heads of all given depths and rejection
weights are trained together, reading the cache once. Missing target outputs and a missing cache are
made first. Running the same command again continues a stopped run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from operator import itemgetter

from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.base import ConfigError, counted
from drafttrain.config.commands import CacheConfig, DistillConfig
from drafttrain.config.reading import settings_of_group
from drafttrain.config.recipes import HeadRecipe
from drafttrain.data.distill.distill import distill
from drafttrain.data.distill.plan import plan_distillation
from drafttrain.data.distill.recipe_rows import distill_settings
from drafttrain.data.hidden.cache import build_cache, check_cache, estimate_cache
from drafttrain.data.hidden.states import HiddenCache, open_cache
from drafttrain.data.shards.outputs import Manifest
from drafttrain.data.shards.store import MANIFEST
from drafttrain.evaluation.calibration import binary_kl
from drafttrain.models.acceptance_head import head_name
from drafttrain.models.draft_states import state_size
from drafttrain.models.drafters import check_drafter, load_checked_drafter
from drafttrain.models.loading import check_target, load_target
from drafttrain.training.loop import Task, train
from drafttrain.training.losses import acceptance_loss
from drafttrain.training.objectives.head_sweep import HeadSweep, make_heads
from drafttrain.training.recipe import already_finished, begin_run, print_steps
from drafttrain.training.run_folder import save_heads

import torch
from transformers import PretrainedConfig


@recipe_command(HeadRecipe, "recipes/quickstart_heads.yaml")
def main(settings: HeadRecipe, dry_run: DryRun = False) -> None:
    drafter = check_settings(settings)
    if dry_run:
        print_plan(settings, drafter)
        return
    if already_finished(settings):
        return
    accelerator = begin_run(settings, distillations(settings))
    cache, held_out = cached_rows(settings)
    task = make_task(settings, cache, held_out)
    manifest, heads = cache.manifest, task.objective
    size = sum(parameter.numel() for parameter in heads.parameters())
    accelerator.print(
        f"{counted(len(heads.parts), 'head')} with {size:,} parameters; {len(cache.rows):,} rows, "
        f"{sum(manifest.counts):,} positions in {manifest.mixes} mixes, mean acceptance "
        f"{manifest.mean_acceptance:.3f}"
    )
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        print(f"saved {save_heads(settings.run, task.objective.cpu().model)}")


def check_settings(settings: HeadRecipe) -> PretrainedConfig:
    """Checks all before weights are read; returns the drafter's config. Raises ConfigError."""
    if settings.train.precision == "bf16":
        raise ConfigError("train.precision = 'bf16': heads are trained in fp32; leave it out")
    shapes = product(settings.heads.depths, settings.heads.rejection_weights)
    (name, count), *_ = Counter(head_name(*shape) for shape in shapes).most_common(1)
    if count > 1:
        raise ConfigError(f"heads: {count} of them are {name!r}, rounded; leave all but one out")
    distillations(settings)
    target = check_target(settings.target)
    drafter = check_drafter(settings.drafter, settings.target, target)
    for cache in caches(settings).values():
        check_cache(cache, drafter, target)
    return drafter


def distillations(settings: HeadRecipe) -> dict[str, DistillConfig]:
    """Returns distillations by their inputs' setting (`data`, `held_out`). Raises ConfigError."""
    return {
        group: distill_settings(settings, getattr(settings, group), cache.distilled)
        for group, cache in caches(settings).items()
    }


def caches(settings: HeadRecipe) -> dict[str, CacheConfig]:
    """Returns caches by the setting of their inputs; that of `held_out` is in the run's folder."""
    run, given = settings.run, {"out": settings.run / "cache"} | settings.cache
    fixed = {"target": settings.target, "drafter": settings.drafter}
    fixed["distilled"] = settings.distilled or run / "distilled"
    groups = {"data": settings_of_group(CacheConfig, "cache", given, fixed)}
    if settings.held_out is not None:
        fixed["distilled"], given = run / "held_out", given | {"out": run / "held_out_cache"}
        groups["held_out"] = settings_of_group(CacheConfig, "cache", given | {"mixes": 1}, fixed)
    return groups


def cached_rows(settings: HeadRecipe) -> tuple[HiddenCache, HiddenCache | None]:
    """Opens the caches of training and held-out prompts; builds missing ones. Raises ConfigError if
    an existing cache was made with other settings or models."""
    target = load_target(settings.target)
    for distillation in distillations(settings).values():
        distill(distillation, target)
    drafter = load_checked_drafter(target, settings.drafter)
    opened = {}
    for group, cache in caches(settings).items():
        build_cache(cache, target, drafter)
        opened[group] = open_cache(cache.out)
    return opened["data"], opened.get("held_out")


def make_task(settings: HeadRecipe, cache: HiddenCache, held_out: HiddenCache | None) -> Task:
    """Makes the training task. The config.json of heads records drafter, target and sampling."""
    manifest = cache.manifest
    heads = make_heads(
        settings.heads,
        manifest.hidden_size,
        settings.train.seed,
        manifest.mean_acceptance,
        state=manifest.settings.state,
        drafter=manifest.drafter.model_dump(),
        target=manifest.target.model_dump(),
        sampling=manifest.sampling,
        mixing=manifest.settings.token_mixing,
        drafttrain_version=version("drafttrain"),
    )
    validate = Validation(held_out) if held_out is not None else None
    return Task(HeadSweep(heads), cache, cache.lengths(), itemgetter(0), validate)


@dataclass(frozen=True)
class Validation:
    """Binary KL to the labels, weighted loss and mean prediction of each head on held-out rows.

    The mean prediction of a calibrated head equals the mean label; only heads with w_rej = 1 are
    trained for that.
    """

    cache: HiddenCache

    def __call__(self, sweep: HeadSweep) -> dict[str, float]:
        sums = {name: torch.zeros(4, dtype=torch.float64) for name in sweep.parts}
        labels, positions = 0.0, 0
        rows = range(len(self.cache.rows))
        for start in rows[::64]:
            hidden, acceptance = self.cache.read(0, rows[start : start + 64])
            labels, positions = labels + float(acceptance.sum()), positions + len(acceptance)
            for name, head in sweep.parts.items():
                logits = head(hidden.to(head.device)).cpu()
                losses, weights = acceptance_loss(logits, acceptance, head.config.rejection_weight)
                predicted = logits.double().sigmoid()
                kl = binary_kl(acceptance.double().numpy(), predicted.numpy())
                each = (torch.from_numpy(kl), losses, weights, predicted)
                sums[name] += torch.stack([values.double().sum() for values in each])
        metrics = {"mean_acceptance": labels / positions}
        for name, (kl, loss, weight, predicted) in sums.items():
            metrics |= {
                f"held_out_kl/{name}": float(kl / positions),
                f"held_out_loss/{name}": float(loss / weight),
                f"mean_predicted/{name}": float(predicted / positions),
            }
        return metrics | {"best_kl": min(metrics[f"held_out_kl/{name}"] for name in sums)}


def print_plan(settings: HeadRecipe, drafter: PretrainedConfig) -> None:
    """Prints what a run would do, without loading weights or writing anything."""
    cache = caches(settings)["data"]
    with torch.device("meta"):
        heads = make_heads(settings.heads, state_size(drafter, cache.state), settings.train.seed)
    plan = plan_distillation(distillations(settings)["data"])
    tokens = plan.target_tokens
    if (cache.distilled / MANIFEST).is_file():
        counts = Manifest.read(cache.distilled).counts  # None while shards are missing
        tokens = counts.target_tokens if counts else tokens
    positions, disk = estimate_cache(cache, drafter, tokens)
    parameters = sum(head.num_parameters() for head in heads)
    print(f"heads        {len(heads)}, {parameters:,} parameters in total")
    print(f"distillation {plan.text}")
    print(
        f"cache        about {max(1, positions):,} positions in each of {cache.mixes} mixes, "
        f"{disk / 2**20:,.0f} MiB; target and drafter are in memory only until it is made"
    )
    print_steps(parameters, plan.rows, max(1, positions), settings.train)


if __name__ == "__main__":
    main()
