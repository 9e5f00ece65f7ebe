"""Which checkpoints count: those that were due, not those of a run that was asked to stop."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from drafttrain.training.checkpoints import (
    PROGRESS,
    WEIGHTS,
    Progress,
    Schedule,
    average_weights,
    checkpoint_folders,
    load_checkpoint,
    save_checkpoint,
)
from tests.training.tiny_runs import small_drafter


def test_a_checkpoint_written_on_request_is_not_one_of_those_that_are_due(tmp_path: Path) -> None:
    for step in (4, 5, 8, 9, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".writing-step-00000012").mkdir()
    folders = checkpoint_folders(tmp_path)
    assert len(folders) == 5
    due = Schedule(every=4, total=10, keep=2).due(folders)
    assert [folder.name[-2:] for folder in due] == ["04", "08", "10"]  # the last step always is


def test_weights_of_checkpoints_from_before_a_renaming_are_averaged_too(tmp_path: Path) -> None:
    folders = []
    for step, name in enumerate(("coupling_out", "previous_token_out"), start=1):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        save_file({f"{name}.weight": torch.full((2,), 3.0 * step)}, folder / WEIGHTS)
        digests = {WEIGHTS: hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()}
        progress = {"step": step, "world_size": 1, "fingerprint": "", "files": digests}
        (folder / PROGRESS).write_text(json.dumps(progress))
        folders.append(folder)
    mean = average_weights(folders)
    assert mean.keys() == {"previous_token_out.weight"}
    assert mean["previous_token_out.weight"].tolist() == [4.5, 4.5]


def test_tied_weights_are_saved_once_and_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, objective = Accelerator(cpu=True), torch.nn.Module()
    objective.model = small_drafter().float()
    objective.again = objective.model.embedding
    accelerator.prepare(objective)
    with caplog.at_level(logging.WARNING):
        save_checkpoint(
            accelerator, objective, tmp_path, Progress(1, 1, "print"), Schedule(1, 1, 1)
        )
    assert not caplog.records
    [folder] = checkpoint_folders(tmp_path)
    before = objective.again.weight.detach().clone()
    torch.nn.init.zeros_(objective.again.weight)
    assert load_checkpoint(accelerator, folder, "print").step == 1
    assert torch.equal(objective.again.weight, before)
