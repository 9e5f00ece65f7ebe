"""What a recipe that distils its target would do: printed by --dry-run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from accelerate import Accelerator
from torch import nn

from drafttrain.config.recipes import TrainConfig
from drafttrain.data.distill.plan import DistillPlan
from drafttrain.training.loop import count_steps, make_plan


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
