"""Texts followed by the masks of many blocks: layout, attention and dropping as in PARD."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.masked_blocks import (
    NO_ANCHOR,
    BlocksBatch,
    BlocksCollator,
    blocks_of_rows,
    lengths_with_masks,
    shares,
    tasks_of_blocks,
)
from drafttrain.models.spec_drafter.layout import IGNORED
from tests.tiny_models import CAUSAL_FAMILIES, tiny_model
from tests.training.tiny_runs import numbered

MASK = 3
ROWS = [([5, 6, 7], [8, 9, 20, 21, 22, 1]), ([10], [11, 1]), ([12, 13], [1])]
EXAMPLES = numbered(ROWS)


def collator(k: int = 4, kept: float = 0.7, floor: float = 0.2, seed: int = 0) -> BlocksCollator:
    return BlocksCollator(0, MASK, k, kept, floor, seed)


def labelled(batch: BlocksBatch) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields sequence, column, row, anchor and position of each labelled position."""
    for sequence, column in (batch.labels != IGNORED).nonzero().tolist():
        position, anchor = (int(t[sequence, column]) for t in (batch.positions, batch.anchors))
        row = int(batch.documents[sequence, column])
        yield sequence, column, row, position if anchor == NO_ANCHOR else anchor, position


@pytest.mark.parametrize("kept", [0.7, 1.0])
@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_every_row_of_a_packed_pass_equals_a_separate_pass(family, kept):
    model, packed = tiny_model(family), [EXAMPLES, EXAMPLES[1:]]
    batch = collator(kept=kept)(packed)
    masks = 0
    with torch.no_grad():
        given = {"attention_mask": batch.mask(model.dtype), "position_ids": batch.positions}
        found = model(input_ids=batch.input_ids, **given).logits
        for sequence, column, row, anchor, position in labelled(batch):
            example = packed[sequence][row]
            tokens = example.source_ids + example.target_ids
            alone = torch.tensor([tokens[: anchor + 1] + [MASK] * (position - anchor)])
            own = found[sequence, column]
            assert (model(input_ids=alone).logits[0, -1] - own).abs().max() < 1e-10
            assert batch.labels[sequence, column] == tokens[position + 1]
            masks += position > anchor
    assert masks == (14 if kept == 1 else 10)  # of blocks of 4, 4, 4, 3, 2, 1; 2, 1; 2, 1; 1; 1


def test_texts_come_first_and_masks_chain_on_to_their_anchor():
    batch = collator(k=3, kept=1.0)([EXAMPLES[1:], EXAMPLES[:1]])
    assert batch.columns == 8 and batch.input_ids[0, 8:].tolist() == [MASK] + [0] * 8
    text = BlocksCollator(0)([EXAMPLES[1:], EXAMPLES[:1]])
    for name in ("input_ids", "positions", "labels", "documents"):
        assert torch.equal(getattr(batch.text, name), getattr(text, name))
    row = batch.anchors[1], batch.positions[1], batch.depths[1], batch.text_columns[1]
    anchors, positions, depths, places = (values[8:].tolist() for values in row)
    assert anchors == [2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert positions == [3, 4, 4, 5, 5, 6, 6, 7, 7] == places
    assert depths == [1, 2, 1, 2, 1, 2, 1, 2, 1] and not batch.text.depths.any()


def test_rows_of_the_target_are_found_by_their_place_in_the_text():
    batch = collator(kept=1.0)([EXAMPLES, EXAMPLES[1:]])
    labels = batch.text.labels[batch.text.labels != IGNORED]
    assert torch.equal(labels[batch.same_in_text()], batch.labels[batch.labels != IGNORED])
    numbers = iter(batch.same_in_text().tolist())
    rows = [[0, 6, 8], [9, 11]]  # index of each row's first label, by sequence
    prompts = [[2, 0, 1], [0, 1]]
    for sequence, _, row, _, position in labelled(batch):
        assert next(numbers) == rows[sequence][row] + position - prompts[sequence][row]


def test_shares_fall_with_the_place_in_the_block_to_the_floor():
    expected = [1, 0.7, 0.49, 0.343, 0.2401, 0.2, 0.2, 0.2]
    assert list(shares(8, 0.7, 0.2)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_a_block_has_a_token_only_if_it_has_the_previous_one_in_the_set_shares(seed):
    tasks = tasks_of_blocks(1000, 8, 0.7, 0.2, np.random.default_rng(seed))
    assert tasks.max() == 8 and tasks[-1] == 1 and (tasks <= 1000 - np.arange(1000)).all()
    kept = [(tasks[:990] > task).mean() for task in range(8)]
    assert np.abs(np.array(kept) - shares(8, 0.7, 0.2)).max() < 0.01
    again = tasks_of_blocks(1000, 8, 0.7, 0.2, np.random.default_rng(seed))
    assert (again == tasks).all()


def test_dropped_tokens_depend_only_on_seed_epoch_and_row():
    def anchors(example: Example, seed: int = 0) -> list[int]:
        batch = collator(8, 0.5, 0.0, seed)([[EXAMPLES[2], example]])
        return batch.anchors[batch.documents == 1].tolist()

    one = Example(2, 7, [5], list(range(8, 38)))
    assert anchors(one) == anchors(one)
    others = (one._replace(epoch=3), one._replace(row=8))
    assert all(anchors(other) != anchors(one) for other in others)
    assert anchors(one, seed=1) != anchors(one)


@pytest.mark.parametrize("kept", [0.3, 0.7, 1.0])
def test_lengths_are_the_columns_that_rows_take_but_for_their_ends(kept):
    lengths = np.array([[len(source), len(target)] for source, target in ROWS])
    counted = lengths_with_masks(lengths, 4, kept, 0.1)
    for example, length in zip(EXAMPLES, counted, strict=True):
        taken = collator(4, kept, 0.1).alone([example]).input_ids.shape[1]
        assert length - 6 <= taken <= length
    assert lengths_with_masks(np.array([[3, 10]]), 3, 0.7, 0.2).tolist() == [3 + 9 + 7 + 5]


def test_predictions_are_put_together_block_by_block():
    batch = collator(k=3, kept=1.0).alone(EXAMPLES[:1])
    tokens = batch.labels[batch.labels != IGNORED]
    nothing = -1
    assert blocks_of_rows(batch, tokens, 3, 6).tolist() == [
        [8, 9, 20], [9, 20, 21], [20, 21, 22], [21, 22, 1], [22, 1, nothing], [1, nothing, nothing],
    ]  # fmt: skip
