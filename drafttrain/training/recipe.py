"""What every recipe does around its own task: nothing if it is finished, else begin or go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from accelerate import Accelerator

from drafttrain.config.commands import DistillConfig
from drafttrain.config.recipes import TrainConfig
from drafttrain.data.distill.plan import check_distillation
from drafttrain.training.loop import make_accelerator
from drafttrain.training.run_folder import check_run, is_finished, open_run


class Recipe(Protocol):
    """What the settings of every recipe have."""

    run: Path
    train: TrainConfig


def already_finished(run: Path) -> bool:
    """Whether `final/` is there; says so."""
    if is_finished(run):
        print(f"{run} is finished; see {run / 'final'}")
        return True
    return False


def begin_run(
    settings: Recipe, distillations: Mapping[str, DistillConfig] | None = None
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
