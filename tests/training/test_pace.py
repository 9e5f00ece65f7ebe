"""A step does not synchronise with the device, and batches do not depend on workers."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.training.checkpoints import checkpoint_folders
from drafttrain.training.loop import (
    Diverged,
    batches_of,
    closing_lines,
    make_accelerator,
    prepare,
    take_step,
)
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.training.objectives.test_objective import EXAMPLES, OBJECTIVES
from tests.training.tiny_runs import SIX_STEPS, small_task, train_small

ALWAYS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")
READ_BY_TRANSFORMERS = {"predict_ahead": ["_local_scalar_dense"]}
"""Transformers reads once whether the mask that it makes for the target's decoder is all ones."""


class Waits(TorchDispatchMode):
    """Records device synchronisations: reading values, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.").split(".")[0]
        masks = [one for one in tree_leaves(args[1:]) if isinstance(one, Tensor)]
        by_mask = name.startswith("index") and any(one.dtype == torch.bool for one in masks)
        if name.strip("_") in [one.strip("_") for one in ALWAYS] or by_mask:
            self.found.append(name)
        return function(*args, **kwargs or {})


@contextmanager
def waits() -> Iterator[Waits]:
    with Waits() as seen, pytest.MonkeyPatch.context() as patch:
        for name in ("cpu", "tolist", "numpy"):
            patch.setattr(Tensor, name, noted(seen, name, getattr(Tensor, name)))
        yield seen


def noted(seen: Waits, name: str, own: Callable) -> Callable:
    def method(tensor: Tensor, *given, **named):
        seen.found.append(name)
        return own(tensor, *given, **named)

    return method


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_does_not_wait_for_the_device(accumulation, tmp_path):
    settings = SIX_STEPS.model_copy(update={"accumulation": accumulation})
    task, no_glancing = small_task(), ObjectiveConfig(glancing_start=0, glancing_end=0)
    task = replace(task, objective=MaskPredict(task.objective.model, no_glancing))
    prepared = prepare(make_accelerator(settings, tmp_path), task, settings)
    prepared.objective.train()
    batches = batches_of(prepared, 0, 4)
    take_step(prepared, batches, 0.0)  # fills caches
    ready = iter([next(batches) for _ in range(accumulation)])
    # on a CPU AdamW reads its step count, which is on the CPU on any machine
    with mock.patch.object(prepared.optimizer, "step"), waits() as seen:
        take_step(prepared, ready, 0.5)
    assert not seen.found


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"mask_predict"}))
def test_no_objective_waits_for_the_device(name):
    objective, collate = OBJECTIVES[name]()
    objective.train()(collate(EXAMPLES), 0.0)  # fills caches
    another = collate(EXAMPLES)
    with waits() as seen:
        objective(another, 0.0).loss.sum().backward()
    assert seen.found == READ_BY_TRANSFORMERS.get(name, [])


def test_synchronisations_are_counted():
    values = torch.arange(4.0)
    with waits() as seen:
        values[values > 1], float(values.sum()), values.cpu(), values.tolist()
    assert seen.found == ["index", "_local_scalar_dense", "cpu", "tolist"]


def test_workers_make_the_same_batches(tmp_path):
    found = []
    for workers in (0, 2):
        settings = SIX_STEPS.model_copy(update={"workers": workers})
        prepared = prepare(make_accelerator(settings, tmp_path), small_task(), settings)
        found.append(list(batches_of(prepared, 1, 6)))
    for (number, mine), (other, theirs) in zip(*found, strict=True):
        assert number == other and torch.equal(mine.priority, theirs.priority)
        assert torch.equal(mine.layout.rows.tokens, theirs.layout.rows.tokens)
        assert torch.equal(mine.layout.learned, theirs.layout.learned)


@pytest.mark.parametrize("log_every", [1, 5])
def test_a_loss_that_is_no_number_ends_the_run_before_a_checkpoint(log_every, tmp_path):
    task = small_task()
    torch.nn.init.constant_(task.objective.model.embed_tokens.weight, torch.nan)
    settings = SIX_STEPS.model_copy(update={"log_every": log_every})
    with pytest.raises(Diverged, match="train.learning_rate"):
        train_small(task, settings, tmp_path)
    assert not checkpoint_folders(tmp_path)


def test_a_loss_that_did_not_fall_is_reported_if_it_is_above_the_best_constants():
    batches = mock.Mock(seconds=lambda: (4.0, 1.0))
    rate = "6 steps at 1.5 a second; waiting for batches took 25.0%"
    for best in (100.0, None):
        assert [*closing_lines(6, batches, 2.0, best)] == [rate]
    waiting, learned = closing_lines(6, batches, 2.0, 2.0)
    assert waiting == rate and "nothing was learned" in learned


def test_a_checkpoint_holds_what_is_trained_once_and_a_run_reports_waiting(tmp_path, capsys):
    task = replace(small_task(), constant_loss=1e-9)
    frozen = task.objective.model.embed_tokens.weight.requires_grad_(False)
    before = frozen.clone()
    final = train_small(task, SIX_STEPS, tmp_path)
    printed = capsys.readouterr().out
    assert re.search(r"6 steps at \S+ a second; waiting for batches took \d+\.\d%", printed)
    assert "nothing was learned" in printed
    folder = checkpoint_folders(tmp_path)[-1]
    trained = [p for p in task.objective.model.parameters() if p.requires_grad]
    kept = load_file(folder / "weights.safetensors")
    assert "model.shared.weight" not in kept and len(kept) >= len(trained)
    assert not list((folder / "state").glob("*.safetensors"))
    assert torch.equal(final["model.shared.weight"], before)


def test_out_of_memory_names_the_settings_to_change(tmp_path):
    full = mock.Mock(side_effect=torch.OutOfMemoryError)
    with mock.patch("drafttrain.training.loop.take_step", full):
        with pytest.raises(ConfigError, match="train.batch_tokens=60 train.accumulation=2"):
            train_small(small_task(), SIX_STEPS, tmp_path)
