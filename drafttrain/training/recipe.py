"""What recipes do around their own task: say what they would do, or begin or go on with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from torch import nn

from drafttrain.config.commands import DistillConfig
from drafttrain.config.recipes import DistillingRecipe, HeadRecipe, TargetRecipe, TrainConfig
from drafttrain.data.distill.plan import DistillPlan, check_distillation
from drafttrain.training.loop import count_steps, make_accelerator, make_plan
from drafttrain.training.run_folder import check_run, open_run


def already_finished(run: Path) -> bool:
    """Whether `final/` is there, with a model or a folder for each of several heads; says so."""
    final = run / "final"
    finished = (final / "config.json").is_file() or any(final.glob("*/config.json"))
    if finished:
        print(f"{run} is finished; see {final}")
    return finished


def begin_run(
    settings: DistillingRecipe | HeadRecipe | TargetRecipe,
    distillations: Mapping[str, DistillConfig] | None = None,
) -> Accelerator:
    """Join the launch's processes and open the run's folder, once all that can be is checked.

    distillations: what the run makes first, by the setting that its inputs come from. Raises
    ConfigError, before anything is written, for a folder of another run and inputs that cannot be
    distilled.
    """
    check_run(settings.run, settings)
    for group, distillation in (distillations or {}).items():
        check_distillation(distillation, group)
    accelerator = make_accelerator(settings.train, settings.run)
    if accelerator.is_main_process:
        open_run(settings.run, settings)
    accelerator.wait_for_everyone()
    return accelerator


@dataclass(frozen=True)
class TrainingPlan:
    """What training would take, estimated for rows that are all of the same length."""

    parameters: int
    batches: int
    """Of an epoch."""
    steps: int
    batches_per_step: int
    checkpoints: int
    """Most that lie there at a time."""

    @property
    def disk_bytes(self) -> int:
        """Of the checkpoints (weights, optimizer) and final/."""
        return (self.checkpoints * 16 + 4) * self.parameters

    @property
    def memory_bytes(self) -> int:
        """Of weights, gradients and optimizer."""
        return 16 * self.parameters


def plan_training(parameters: int, rows: int, tokens: int, settings: TrainConfig) -> TrainingPlan:
    """tokens: of all rows, as batches count them."""
    lengths = np.full(rows, max(1, tokens // max(rows, 1)))
    plan, world = make_plan(lengths, settings), Accelerator().num_processes
    return TrainingPlan(
        parameters=parameters,
        batches=plan.batches_per_epoch,
        steps=count_steps(plan, settings, world),
        batches_per_step=settings.accumulation * world,
        checkpoints=max(settings.keep_checkpoints, settings.average),
    )


def print_training(
    distillation: DistillPlan, settings: TrainConfig, drafter: nn.Module, more_tokens: int = 0
) -> None:
    """Sizes, steps, disk and memory. more_tokens: of each row, beside source and output."""
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    rows = distillation.rows
    tokens = distillation.source_tokens + distillation.target_tokens + more_tokens * rows
    plan = plan_training(parameters, rows, tokens, settings)
    batches = max(1, round(tokens / settings.batch_tokens))
    mib = 2**20
    print(f"drafter      {parameters:,} parameters")
    print(f"distillation {distillation}")
    print(f"batches      {batches:,} an epoch of about {settings.batch_tokens:,} tokens")
    print(f"steps        {plan.steps:,} of {plan.batches_per_step} batches")
    print(f"disk         {plan.disk_bytes / mib:,.0f} MiB for {plan.checkpoints} checkpoints")
    print(f"memory       {plan.memory_bytes / mib:,.0f} MiB for weights, gradients and optimizer")
