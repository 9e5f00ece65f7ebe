"""A training run of six steps on a tiny drafter, for tests of damage, signals and full disks."""

from pathlib import Path

import pytest
import torch

from drafttrain.config.base import Interrupted
from tests.training.tiny_runs import SIX_STEPS, small_task, stop_at, train_small

SETTINGS = SIX_STEPS.model_copy(update={"average": 2})


def run_training(run: Path, stop_at_step_3: bool = False) -> dict[str, torch.Tensor]:
    """Trains to the end, or sends itself SIGTERM in step 3. Returns the final weights."""
    task = small_task(stop_at(3) if stop_at_step_3 else None, dropout=0.2)
    return train_small(task, SETTINGS, run)


def stopped_run(run: Path) -> Path:
    """Makes a run with checkpoints of steps 2 and 3."""
    with pytest.raises(Interrupted, match="stopped at step 3 of 6; .*same command again"):
        run_training(run, stop_at_step_3=True)
    return run


def files(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files of a folder by relative path."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
