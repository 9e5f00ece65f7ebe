"""Training gives the same result with any accumulation and after any interruption."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drafttrain.config.recipes import TrainConfig
from drafttrain.training.checkpoints import CheckpointError, average_weights, checkpoint_folders
from drafttrain.training.loop import (
    Interrupted,
    batches_of,
    count_steps,
    learning_rate,
    make_accelerator,
    make_optimizer,
    make_plan,
    prepare,
    take_step,
)
from tests.comparing import same_weights
from tests.tiny_drafters import block_heads
from tests.training.tiny_runs import SIX_STEPS, logged, small_task, stop_at, train_small


def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    whole = train_small(small_task(dropout=0.2), SIX_STEPS, tmp_path / "whole")
    run = tmp_path / "cut"
    task = small_task(dropout=0.2, validate=stop_at(3))
    with pytest.raises(Interrupted, match="step 3 of 6"):
        train_small(task, SIX_STEPS, run)
    assert [folder.name for folder in checkpoint_folders(run)][-1] == "step-00000003"
    resumed = train_small(small_task(dropout=0.2), SIX_STEPS, run)
    assert same_weights(whole, resumed)
    assert logged(run, "loss") == logged(tmp_path / "whole", "loss")


def test_accumulated_batches_give_the_step_of_the_same_batches_at_once(tmp_path):
    """Two accumulated batches of unequal weight: the total is divided once, not a mean of means."""
    settings = SIX_STEPS.model_copy(update={"max_steps": 1, "accumulation": 2, "clip": None})
    task = small_task()
    batches = list(make_plan(task.lengths, settings).stream(range(2)))
    assert len(batches[0]) != len(batches[1]) or len(set(task.lengths)) > 1
    by_hand = small_task()
    learning, rows = by_hand.objective.train(), by_hand.rows
    sums = [learning(by_hand.collate(rows.__getitems__(keys)), 0.0) for keys in batches]
    (sum(s.loss for s in sums) / sum(s.weight for s in sums)).backward()
    prepared = prepare(make_accelerator(settings, tmp_path), task, settings)
    prepared.objective.train()
    with mock.patch.object(prepared.optimizer, "zero_grad"):  # keeps the gradients
        take_step(prepared, batches_of(prepared, 0, 1), 0.0)
    pairs = zip(task.objective.parameters(), learning.parameters(), strict=True)
    compared = [(a.grad - b.grad).abs().max() for a, b in pairs if b.requires_grad]
    assert compared and max(compared) < 1e-5


def test_only_matrices_have_weight_decay():
    task = small_task()
    settings = SIX_STEPS.model_copy(update={"weight_decay": 0.1})
    trained = [one for one in task.objective.parameters() if one.requires_grad]
    assert {one.ndim for one in trained} == {1, 2}
    heads = nn.ModuleDict({"model": block_heads()})  # whose biases are matrices
    cases = (
        (task.objective, [one for one in trained if one.ndim > 1]),
        (heads, [heads.model.inner_weight, heads.model.outer_weight]),
    )
    for objective, expected in cases:
        groups = make_optimizer(replace(task, objective=objective), settings).param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert {*map(id, groups[0]["params"])} == {*map(id, expected)}


def test_newest_checkpoints_are_kept_and_averaged(tmp_path):
    settings = SIX_STEPS.model_copy(update={"average": 2})
    final = train_small(small_task(), settings, tmp_path)
    folders = checkpoint_folders(tmp_path)
    assert [folder.name for folder in folders] == ["step-00000004", "step-00000006"]
    one, two = (load_file(folder / "weights.safetensors") for folder in folders)
    assert average_weights(folders).keys() == one.keys() <= final.keys()
    for name in one:
        assert torch.allclose(final[name], (one[name] + two[name]) / 2, atol=1e-7)


def test_other_settings_do_not_continue_a_run(tmp_path):
    short = SIX_STEPS.model_copy(update={"max_steps": 1})
    train_small(small_task(), short, tmp_path)
    other = short.model_copy(update={"learning_rate": 2e-3})
    with pytest.raises(CheckpointError, match="other settings"):
        train_small(small_task(), other, tmp_path)


def test_steps_follow_from_epochs_and_processes():
    plan = make_plan(small_task().lengths, SIX_STEPS)
    epochs = SIX_STEPS.model_copy(update={"max_steps": None, "epochs": 4})
    assert count_steps(plan, epochs, world_size=1) == 4 * plan.batches_per_epoch
    assert count_steps(plan, epochs, world_size=2) == 2 * plan.batches_per_epoch


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("inverse-sqrt", 0, 1e-7 + (1.0 - 1e-7) / 4),
        ("inverse-sqrt", 3, 1.0),
        ("inverse-sqrt", 15, 0.5),
        ("cosine", 11, 0.5),
        ("cosine", 19, 0.0),
        ("constant", 19, 1.0),
    ],
)
def test_learning_rates_by_hand(schedule, step, expected):
    settings = TrainConfig(learning_rate=1.0, warmup=4, schedule=schedule)
    assert learning_rate(settings, step, 20) == pytest.approx(expected)
