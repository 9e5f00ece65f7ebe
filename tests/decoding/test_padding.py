"""Padding of rows of several lengths in one batch."""

import pytest
import torch

from drafttrain.decoding.padding import padded


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_padded_on_a_side_with_masks_that_show_their_tokens(side):
    rows = [torch.tensor([4, 5, 6]), torch.tensor([7])]
    ids, mask = padded(rows, 0, side)
    assert ids.tolist() == [[4, 5, 6], [7, 0, 0] if side == "right" else [0, 0, 7]]
    for row, own, counted in zip(rows, ids, mask, strict=True):
        assert torch.equal(own[counted.bool()], row)
