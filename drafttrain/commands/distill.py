"""Write a target's outputs, or a drafter's hidden states, as training data; or only the plan.

This is where a backend's name becomes what decodes: `data` distils with whatever it is handed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name

from drafttrain.config.commands import CacheConfig, DistillConfig
from drafttrain.data.distill.batches import BatchDecoder
from drafttrain.data.distill.distill import distill as write_outputs
from drafttrain.data.distill.plan import check_distill_settings, plan_distillation
from drafttrain.data.hidden.cache import build_cache, plan_cache
from drafttrain.models.loading import LoadedTarget


def distill(settings: DistillConfig, dry_run: bool = False) -> None:
    """Distil, or only print the plan. Raises ConfigError before anything is written."""
    check_backend(settings)
    if dry_run:
        print(plan_distillation(settings))
    else:
        write_outputs(settings, open_decoder=open_decoder)


def cache(settings: CacheConfig, dry_run: bool = False) -> None:
    """Make the cache, or only print the plan. Raises ConfigError before anything is written."""
    if dry_run:
        print(plan_cache(settings))
    else:
        build_cache(settings)


def open_decoder(settings: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """What decodes for the backend that the settings ask for. Raises ConfigError."""
    return resolve_name(settings.decoded_by.opens)(settings, target)


def check_backend(settings: DistillConfig) -> None:
    """Refuse what the backend knows to be wrong, before any weights are read. Raises ConfigError.

    What the backends have in common is checked first.
    """
    check_distill_settings(settings)
    if settings.decoded_by.checks is not None:
        resolve_name(settings.decoded_by.checks)(settings)


def checked(distillations: Mapping[str, DistillConfig]) -> Mapping[str, DistillConfig]:
    """The same, once `check_backend` has passed each: what a recipe makes first."""
    for settings in distillations.values():
        check_backend(settings)
    return distillations
