"""Batches contain every row once per epoch, respect the budget, and do not depend on history."""

import numpy as np
import pytest
import torch

from drafttrain.data.batches.batch_plan import BatchPlan
from drafttrain.data.batches.examples import PairCollator
from drafttrain.data.batches.slots import SlotCollator
from drafttrain.models.spec_drafter.shape import DraftShape

LENGTHS = np.random.default_rng(0).integers(3, 30, size=101)


def test_every_row_comes_once_an_epoch_within_the_budget():
    plan = BatchPlan(LENGTHS, 120, seed=1)
    batches = plan.epoch(3)
    assert sorted(np.concatenate(batches)) == list(range(101))
    assert max(len(rows) * LENGTHS[rows].max() for rows in batches) <= 120
    assert len(batches) == plan.batches_per_epoch


def test_pairs_are_batched_by_what_their_padding_costs():
    random = np.random.default_rng(0)
    sources = random.integers(3, 60, 3000)
    pairs = np.stack((sources, np.maximum(2, sources + random.integers(-8, 9, 3000))), axis=1)
    plan = BatchPlan(pairs, 600, seed=1)
    batches = plan.epoch(0)
    assert sorted(np.concatenate(batches)) == list(range(3000))
    costs = [len(rows) * pairs[rows].max(0).sum() for rows in batches]
    assert max(costs) <= 600
    by_total = BatchPlan(pairs.sum(1), 600, seed=1).epoch(0)
    assert pairs.sum() / sum(costs) > 0.92
    assert sum(costs) < 0.95 * sum(len(rows) * pairs[rows].max(0).sum() for rows in by_total)


def test_epochs_differ_and_a_later_start_gives_the_same_batches():
    plan = BatchPlan(LENGTHS, 120, seed=1)
    assert [b.tolist() for b in plan.epoch(0)] != [b.tolist() for b in plan.epoch(1)]
    whole = list(plan.stream(range(50)))
    assert list(plan.stream(range(31, 50, 3))) == whole[31::3]


@pytest.mark.parametrize(
    ("lengths", "message"), [([], "no rows"), ([5, 500, 400], "row 1 with 500 tokens")]
)
def test_impossible_plans_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        BatchPlan(np.array(lengths), 120, seed=0)


def test_rows_that_no_batch_can_hold_are_left_out_and_named():
    lengths = np.array([5, 500, 7, 6])
    plan, short = BatchPlan(lengths, 120, seed=0), BatchPlan(lengths[lengths < 120], 120, seed=0)
    assert "1 of 4 rows" in plan.left_out() and "row 1 with 500 tokens" in plan.left_out()
    assert sorted(np.concatenate(plan.epoch(0))) == [0, 2, 3] and not short.left_out()
    kept = np.array([0, 2, 3])
    assert [kept[rows].tolist() for rows in short.epoch(2)] == [r.tolist() for r in plan.epoch(2)]


def test_draws_depend_only_on_seed_epoch_and_row():
    shape = DraftShape(mask_id=10, vocab_size=10)
    collate = SlotCollator(shape, 4, blocks=2, seed=7, start_token=0)
    first, second = (0, 3, [4, 5, 1], [4, 5, 6, 7, 1]), (0, 8, [4, 1], [4, 5, 1])
    together, alone = collate([first, second]), collate([second])
    assert torch.equal(together.priority[1:], alone.priority)
    blocks = together.layout.of_blocks(together.layout.rows.positions)[1:]
    assert torch.equal(blocks, alone.layout.of_blocks(alone.layout.rows.positions))
    later = collate([(1, 8, [4, 1], [4, 5, 1])])
    assert not torch.equal(later.priority, alone.priority)


def test_prefix_lengths_are_uniform_over_the_sentence():
    shape = DraftShape(mask_id=10, vocab_size=10, slots="paper")
    collate = SlotCollator(shape, 4, blocks=1, seed=0, start_token=0)
    batch = collate([(0, row, [4], [5, 6, 7, 1]) for row in range(4000)])
    prefixes = batch.layout.of_blocks(batch.layout.rows.positions)[:, 0, 0]
    share = torch.bincount(prefixes, minlength=4) / 4000
    assert len(share) == 4 and (share - 0.25).abs().max() < 0.03


def test_pairs_are_padded_and_masked():
    batch = PairCollator(pad_token_id=0)([(0, 0, [5, 1], [6, 7, 1]), (0, 1, [5, 6, 1], [7, 1])])
    assert batch.input_ids.tolist() == [[5, 1, 0], [5, 6, 1]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.labels.tolist() == [[6, 7, 1], [7, 1, -100]]
