"""A training run of six steps on a tiny drafter, to be damaged, stopped and starved."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from drafttrain.config.base import Interrupted
from drafttrain.config.recipes import ObjectiveConfig, TrainConfig
from drafttrain.data.batches.slots import SlotCollator
from drafttrain.training.loop import Task, make_accelerator, train
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.training.tiny_runs import examples, small_drafter

SETTINGS = TrainConfig(
    max_steps=6,
    threads=1,
    batch_tokens=120,
    learning_rate=1e-3,
    warmup=2,
    checkpoint_every=2,
    keep_checkpoints=2,
    average=2,
    validate_every=3,
    log_every=1,
)


def run_training(run: Path, stop_at_step_3: bool = False) -> dict[str, torch.Tensor]:
    """Trains to the end, or sends itself SIGTERM in step 3. -> the final weights."""
    run.mkdir(parents=True, exist_ok=True)
    rows = [{"source_ids": s, "target_ids": t} for _, _, s, t in examples(12)]
    drafter = small_drafter(0.2).float()
    lengths = np.array([len(r["source_ids"]) + len(r["target_ids"]) for r in rows]) + 6
    task = Task(
        MaskPredict(drafter, ObjectiveConfig()),
        datasets.Dataset.from_list(rows),
        lengths,
        SlotCollator(drafter.config, 2, seed=0),
        _send_sigterm if stop_at_step_3 else None,
    )
    train(make_accelerator(SETTINGS, run), task, SETTINGS, run)
    return {name: value.clone() for name, value in drafter.state_dict().items()}


def stopped_run(run: Path) -> Path:
    """A run with checkpoints of steps 2 and 3."""
    with pytest.raises(Interrupted, match="stopped at step 3 of 6; .*go on with: "):
        run_training(run, stop_at_step_3=True)
    return run


def _send_sigterm(_) -> dict[str, float]:
    os.kill(os.getpid(), signal.SIGTERM)
    return {}


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder by their paths."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
