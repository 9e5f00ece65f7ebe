"""What a recipe that distils its target would do: printed by --dry-run."""

from __future__ import annotations

import numpy as np
from accelerate import Accelerator
from torch import nn

from drafttrain.config.recipes import TrainConfig
from drafttrain.data.distill.plan import DistillPlan
from drafttrain.training.loop import Task, count_steps, make_plan


def print_training(
    distillation: DistillPlan, settings: TrainConfig, drafter: nn.Module, more_tokens: int = 0
) -> None:
    """Sizes, steps, disk and memory. more_tokens: of each row, beside source and output."""
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    rows = distillation.rows
    tokens = distillation.source_tokens + distillation.target_tokens + more_tokens * rows
    batches = max(1, round(tokens / settings.batch_tokens))
    lengths = np.full(rows, max(1, tokens // max(rows, 1)))
    world = Accelerator().num_processes
    steps = count_steps(make_plan(Task(drafter, None, lengths, None), settings), settings, world)
    keep = max(settings.keep_checkpoints, settings.average)
    print(f"drafter      {parameters:,} parameters")
    print(f"distillation {distillation}")
    print(f"batches      {batches:,} an epoch of about {settings.batch_tokens:,} tokens")
    print(f"steps        {steps:,} of {settings.accumulation * world} batches")
    print(f"disk         {(keep * 16 + 4) * parameters / 2**20:,.0f} MiB for {keep} checkpoints")
    print(f"memory       {16 * parameters / 2**20:,.0f} MiB for weights, gradients and optimizer")
