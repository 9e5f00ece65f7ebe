"""Heads trained together: hand-computed losses, and the results of training each head alone."""

import math
from itertools import product
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from drafttrain.config.recipes import HeadConfig, TrainConfig
from drafttrain.data.hidden.states import HeadBatch
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.training.loop import Task
from drafttrain.training.losses import acceptance_loss
from drafttrain.training.objectives.head_sweep import HeadSweep, make_heads
from tests.comparing import same_weights
from tests.training.tiny_runs import SIX_STEPS, train_small

WIDTH = 6
SWEEP = HeadConfig(depths=(0, 3), rejection_weights=(1.0, 6.0))
SETTINGS = SIX_STEPS.model_copy(update={"batch_tokens": 40, "learning_rate": 1e-2, "clip": 0.05})


class Rows(Dataset):
    """Twelve rows of 3 to 14 random positions, with other values in each of two mixes."""

    sizes = np.arange(3, 15)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitems__(self, keys) -> list[HeadBatch]:
        rows = []
        for epoch, row in keys:
            random = torch.Generator().manual_seed(100 * (epoch % 2) + row)
            hidden = torch.randn(int(self.sizes[row]), WIDTH, generator=random)
            rows.append((hidden, (hidden[:, 0] + 1).clamp(0, 1)))
        return [HeadBatch(torch.cat([h for h, _ in rows]), torch.cat([p for _, p in rows]))]


def make_task(settings: HeadConfig) -> Task:
    sweep = HeadSweep(make_heads(settings, WIDTH, seed=0, mean_acceptance=0.7))
    return Task(sweep, Rows(), Rows.sizes, itemgetter(0))


def trained(settings: HeadConfig, train: TrainConfig, run: Path) -> dict[str, AcceptanceHead]:
    """Returns heads that were trained together, by name."""
    task = make_task(settings)
    train_small(task, train, run)
    return task.objective.parts


def test_loss_by_hand():
    """P = 0.25, P^ = 0.5, w_rej = 6: loss 0.25 log 2 + 6 * 0.75 log 2, weight 0.25 + 4.5."""
    loss, weight = acceptance_loss(torch.tensor([0.0]), torch.tensor([0.25]), 6.0)
    assert loss.item() == pytest.approx(4.75 * math.log(2))
    assert weight.item() == pytest.approx(4.75)
    logit = torch.tensor([math.log(0.8 / 0.2)])
    loss, _ = acceptance_loss(logit, torch.tensor([0.5]), 3.0)
    assert loss.item() == pytest.approx(-0.5 * math.log(0.8) - 1.5 * math.log(0.2))
    extreme = torch.tensor([1e4, -1e4, 1e4, -1e4])  # stay finite
    loss, _ = acceptance_loss(extreme, torch.tensor([1.0, 0.0, 0.0, 1.0]), 2.0)
    assert loss.tolist() == [0.0, 0.0, 2e4, 1e4]


def test_sums_and_gradients_are_those_of_each_head_by_itself():
    settings = HeadConfig(depths=(3, 0, 1, 4), rejection_weights=(1.0, 6.0))
    sweep = HeadSweep(make_heads(settings, WIDTH, seed=0)).double()
    random = torch.Generator().manual_seed(150)
    hidden = torch.randn(150, WIDTH, generator=random, dtype=torch.float64)
    batch = HeadBatch(hidden, torch.rand(150, generator=random, dtype=torch.float64))
    sums = sweep(batch, 0.0)
    scale = torch.arange(1, len(sweep.model) + 1, dtype=torch.float64)
    (sums.loss * scale).sum().backward()
    for index, head in enumerate(sweep.model):
        found = [parameter.grad for parameter in head.parameters()]
        logits = head(batch.hidden)
        losses, weights = acceptance_loss(logits, batch.acceptance, head.config.rejection_weight)
        assert sums.loss[index].item() == pytest.approx(losses.sum().item(), rel=1e-12)
        assert sums.weight[index].item() == pytest.approx(weights.sum().item(), rel=1e-12)
        right = ((logits > 0) == (batch.acceptance > 0.5)).sum()
        assert sums.correct[index] == right and sums.counted[index] == 150
        expected = torch.autograd.grad(losses.sum() * scale[index], list(head.parameters()))
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() < 1e-10


def test_an_empty_batch_keeps_a_graph():
    sweep = HeadSweep(make_heads(SWEEP, WIDTH, seed=0))
    sums = sweep(HeadBatch(torch.empty(0, WIDTH), torch.empty(0)), 0.0)
    sums.loss.sum().backward()
    assert not sums.loss.any() and not sums.weight.any()
    assert all(not parameter.grad.any() for parameter in sweep.parameters())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_head_in_a_sweep_equals_one_trained_alone(tmp_path, accumulation):
    """With clipping and two batches per step; each head has its own norm and normaliser."""
    settings = SETTINGS.model_copy(update={"accumulation": accumulation, "weight_decay": 0.1})
    together = trained(SWEEP, settings, tmp_path / "sweep")
    for depth, weight in product(SWEEP.depths, SWEEP.rejection_weights):
        one = HeadConfig(depths=(depth,), rejection_weights=(weight,))
        [(name, head)] = trained(one, settings, tmp_path / f"D{depth}-w{weight:g}").items()
        for own, other in zip(head.parameters(), together[name].parameters(), strict=True):
            assert (own - other).abs().max() < 1e-6, name
    first = make_task(SWEEP).objective.model[0].out.weight
    assert (together["D0-w1"].out.weight - first).abs().max() > 1e-3  # something was learned


def test_initial_weights_depend_only_on_seed_and_name():
    sweep = {head.config.name: head for head in make_heads(SWEEP, WIDTH, seed=0)}
    torch.manual_seed(123)
    (alone,) = make_heads(HeadConfig(depths=(3,), rejection_weights=(6.0,)), WIDTH, seed=0)
    assert same_weights(alone, sweep["D3-w6"])
    assert not torch.equal(sweep["D3-w1"].out.weight, sweep["D3-w6"].out.weight)


def test_the_first_prediction_is_the_best_constant():
    """The weighted cross-entropy is minimal at the odds P / (w (1 - P)): 0.9 / (3 * 0.1) = 3."""
    settings = HeadConfig(depths=(1,), rejection_weights=(3.0,))
    (head,) = make_heads(settings, WIDTH, seed=0, mean_acceptance=0.9)
    assert head.out.bias.item() == pytest.approx(math.log(3.0), rel=1e-6)
