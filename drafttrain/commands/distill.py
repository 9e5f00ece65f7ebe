"""Write a target's outputs, or a drafter's hidden states, as training data; or only the plan."""

from __future__ import annotations

from drafttrain.config.commands import CacheConfig, DistillConfig
from drafttrain.data.distill.distill import distill as write_outputs
from drafttrain.data.distill.distill import plan_distillation
from drafttrain.data.hidden.cache import build_cache, plan_cache


def distill(settings: DistillConfig, dry_run: bool = False) -> None:
    """Distil, or only print the plan. Raises ConfigError before anything is written."""
    if dry_run:
        print(plan_distillation(settings))
    else:
        write_outputs(settings)


def cache(settings: CacheConfig, dry_run: bool = False) -> None:
    """Make the cache, or only print the plan. Raises ConfigError before anything is written."""
    if dry_run:
        print(plan_cache(settings))
    else:
        build_cache(settings)
