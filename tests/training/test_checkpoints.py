"""Scheduled checkpoints, which exclude those written because a run was stopped."""

import logging

import torch
from accelerate import Accelerator

from drafttrain.training.checkpoints import (
    Progress,
    Schedule,
    checkpoint_folders,
    load_checkpoint,
    save_checkpoint,
)
from tests.training.tiny_runs import slot_drafter


def test_a_checkpoint_written_on_request_is_not_one_of_those_that_are_due(tmp_path):
    for step in (4, 5, 8, 9, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".writing-step-00000012").mkdir()
    folders = checkpoint_folders(tmp_path)
    assert len(folders) == 5
    due = Schedule(every=4, total=10, keep=2).due(folders)
    assert [folder.name[-2:] for folder in due] == ["04", "08", "10"]  # always the last step


def test_tied_weights_are_saved_once_and_without_a_warning(tmp_path, caplog):
    accelerator, objective = Accelerator(cpu=True), torch.nn.Module()
    objective.model = slot_drafter().float()
    objective.again = objective.model.embed_tokens
    objective = accelerator.prepare(objective)
    progress, schedule = Progress(1, 1, "print"), Schedule(1, 1, 1)
    with caplog.at_level(logging.WARNING):
        save_checkpoint(accelerator, objective, tmp_path, progress, schedule)
    assert not caplog.records
    [folder] = checkpoint_folders(tmp_path)
    before = objective.again.weight.detach().clone()
    torch.nn.init.zeros_(objective.again.weight)
    assert load_checkpoint(accelerator, objective, folder, "print").step == 1
    assert torch.equal(objective.again.weight, before)
