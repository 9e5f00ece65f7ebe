"""Rows packed into one sequence: how they are chosen, laid out and separated."""

import datasets
import numpy as np
import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.data.batches.examples import Examples
from drafttrain.data.batches.masked_blocks import BlocksCollator, lay_out_texts
from drafttrain.data.batches.packing import PackedExamples, pack, share_sequences
from drafttrain.data.distill.recipe_rows import rows_with_labels
from drafttrain.models.spec_drafter.layout import IGNORED
from tests.training.tiny_runs import numbered

ROWS = [([5, 6, 7], [8, 9, 1]), ([10], [11, 1]), ([12, 13], [1])]
EXAMPLES = numbered(ROWS)


def test_each_row_goes_where_the_least_room_is_left_for_it():
    lengths = np.array([3, 6, 4, 2, 9, 4])
    sequences = pack(lengths, 8)
    assert sequences == [[4], [1, 3], [2, 5], [0]]  # 9 is too long to share a sequence


@pytest.mark.parametrize(
    ("most", "taught", "sequences", "sizes"),
    [(None, [1, 4], [[1], [4]], [6, 9]), (8, [0, 2, 3, 5], [[2, 5], [0, 3]], [8, 5])],
)
def test_rows_without_labels_are_in_no_sequence(most, taught, sequences, sizes):
    packed, lengths = share_sequences(None, np.array([3, 6, 4, 2, 9, 4]), most, taught)
    assert packed.sequences == sequences and lengths.tolist() == sizes


@pytest.mark.parametrize("most", [1, 20, 64])
def test_packing_loses_and_doubles_no_row(most):
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    sequences = pack(lengths, most)
    assert sorted(row for rows in sequences for row in rows) == list(range(200))
    sizes = [lengths[rows].sum() for rows in sequences]
    assert all(size <= most or len(rows) == 1 for size, rows in zip(sizes, sequences, strict=True))
    if most == 64:  # close to the minimal number of sequences
        assert len(sequences) <= 1.05 * np.ceil(lengths.sum() / most)


def test_positions_of_packed_rows_start_at_0_and_only_outputs_have_labels():
    first, second, third = EXAMPLES
    batch = BlocksCollator(pad_token_id=0)([[first, third], [second]])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 12, 13], [10, 11, 0, 0, 0, 0, 0]]
    assert batch.positions.tolist()[0] == [0, 1, 2, 3, 4, 0, 1]
    first_labels = [IGNORED, IGNORED, 8, 9, 1, IGNORED, 1]
    assert batch.labels.tolist() == [first_labels, [11, 1, *[IGNORED] * 5]]
    seen = batch.mask(torch.float32)[0, 0] == 0
    assert seen[6].tolist() == [False] * 5 + [True] * 2
    assert seen[4].tolist() == [True] * 5 + [False] * 2
    alone = BlocksCollator(pad_token_id=0).alone(EXAMPLES)
    assert alone.mask(torch.float32) is None  # of one row
    assert alone.labels.tolist()[2] == [IGNORED, 1, *[IGNORED] * 3]


def test_where_the_target_reads_prompts_it_tells_the_first_token():
    [text], [own] = (lay_out_texts([EXAMPLES], reads) for reads in (False, True))
    assert text | {"labels": own["labels"]} == own
    assert text["labels"] == [IGNORED] * 3 + [9, 1] + [IGNORED] + [1] + [IGNORED] * 2


def test_sequences_are_fetched_with_their_rows_and_epochs():
    columns = {"source_ids": [s for s, _ in ROWS], "target_ids": [t for _, t in ROWS]}
    rows = Examples(datasets.Dataset.from_dict(columns))
    found = PackedExamples(rows, [[2, 0], [1]]).__getitems__([(4, 1), (3, 0)])
    assert [[(e.epoch, e.row, e.target_ids) for e in own] for own in found] == [
        [(4, 1, [11, 1])],
        [(3, 2, [1]), (3, 0, [8, 9, 1])],
    ]


def test_outputs_of_one_token_have_no_labels_where_the_target_supplies_it():
    columns = {"source_ids": [[5, 6]] * 3, "target_ids": [[7, 1], [1], [8, 9, 1]]}
    rows = datasets.Dataset.from_dict(columns)
    assert rows_with_labels(rows, True).tolist() == [0, 1, 2]
    assert rows_with_labels(rows, False).tolist() == [0, 2]
    with pytest.raises(ConfigError, match="all distilled outputs are single tokens"):
        rows_with_labels(rows.select([1]), False)
