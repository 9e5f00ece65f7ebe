"""Write a target's own outputs as training data, or say what that would take."""

from __future__ import annotations

from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.distill import distill as write_outputs
from drafttrain.data.distill.plan import plan_distillation


def distill(settings: DistillConfig, dry_run: bool = False) -> None:
    """Distil, or only print the plan. Raises ConfigError before anything is written."""
    if dry_run:
        print(plan_distillation(settings))
    else:
        write_outputs(settings)
