"""Write a drafter's hidden states and their labels, or say what that would take."""

from __future__ import annotations

from drafttrain.config.commands import CacheConfig
from drafttrain.data.hidden.cache import build_cache
from drafttrain.data.hidden.plan import plan_cache


def cache(settings: CacheConfig, dry_run: bool = False) -> None:
    """Make the cache, or only print the plan. Raises ConfigError before anything is written."""
    if dry_run:
        print(plan_cache(settings))
    else:
        build_cache(settings)
