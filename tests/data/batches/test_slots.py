"""Glancing reveals the right number of slots and removes their labels from the loss."""

import pytest
import torch

from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.slots import SlotCollator, choose_revealed, glancing_ratio, reveal
from drafttrain.models.spec_drafter.layout import IGNORED, Layout, lay_out
from drafttrain.models.spec_drafter.shape import DraftShape


def test_ratio_falls_linearly_and_ends_exactly():
    assert glancing_ratio(0.5, 0.3, 0.0) == 0.5
    assert glancing_ratio(0.5, 0.3, 0.5) == pytest.approx(0.4)
    assert glancing_ratio(0.5, 0.3, 1.0) == 0.3


@pytest.mark.parametrize(("wrong", "ratio", "expected"), [(5, 0.5, 2), (1, 0.5, 0), (4, 1.0, 4)])
def test_floor_of_the_share_is_revealed(wrong, ratio, expected):
    revealable = torch.tensor([[[True] * 5 + [False] * 3]])
    revealed = choose_revealed(torch.tensor([[wrong]]), revealable, torch.rand(1, 1, 8), ratio)
    assert revealed.sum() == expected
    assert not (revealed & ~revealable).any()


def test_choice_is_uniform_over_the_slots():
    torch.manual_seed(0)
    priority = torch.rand(4000, 1, 4)
    revealable = torch.ones(4000, 1, 4, dtype=torch.bool)
    revealed = choose_revealed(torch.full((4000, 1), 4), revealable, priority, 0.5)
    share = revealed.float().mean(0)[0]
    assert (share - 0.5).abs().max() < 0.03


def test_blocks_of_a_row_start_after_different_prefixes_of_its_output():
    """Prefixes have 0 to L - 1 tokens of the output, after the given tokens; at most L blocks."""
    collate = SlotCollator(DraftShape(9, 10, "paper"), k=2, blocks=3, seed=0, start_token=0)
    drawn = set()
    for epoch in range(40):
        few, many = Example(epoch, 0, [5], [6, 1], [7, 8]), Example(epoch, 1, [5], [6, 7, 8, 1])
        layout = collate([few, many]).layout
        number = layout.of_blocks(layout.rows.block)[..., 0]
        prefixes = layout.of_blocks(layout.rows.limit)[..., 0] + 1  # paper slots: tokens before
        assert sorted(prefixes[0][number[0] >= 0].tolist()) == [2, 3]
        assert len(set(prefixes[1].tolist())) == 3
        drawn |= set(prefixes[1].tolist())
    assert drawn == {0, 1, 2, 3}


def rows(slots: str, output: list[int], prefix: int) -> Layout:
    """Lays out a block of 4 after `prefix` tokens of an output; token 9 is the mask, 0 the start
    token."""
    targets, lengths = torch.tensor([output]), torch.tensor([len(output)])
    return lay_out(targets, lengths, torch.tensor([[prefix]]), DraftShape(9, 10, slots), 4, 0)


def test_a_revealed_slot_shows_its_token_and_takes_away_the_label_that_it_shows():
    """That of its own in the paper's layout, of the row before it in the anchored one."""
    layout = rows("paper", [5, 6, 7, 8, 1], 1)
    tokens, labels = reveal(layout, torch.tensor([[[False, True, False, False]]]), anchored=False)
    assert layout.of_blocks(tokens).tolist() == [[[9, 7, 9, 9]]]
    assert layout.of_blocks(labels).tolist() == [[[6, IGNORED, 8, 1]]]
    layout = rows("anchored", [5, 6, 7, 8, 1], 1)
    tokens, labels = reveal(layout, torch.tensor([[[False, True, False]]]), anchored=True)
    assert layout.of_blocks(tokens).tolist() == [[[9, 7, 9]]]
    assert layout.of_blocks(labels).tolist() == [[[IGNORED, 8, 1]]]  # 7 is given, 8 is not
    assert layout.of_prefix(labels).tolist() == [[5, 6, 7, 8, 1]]


@pytest.mark.parametrize("slots", ["paper", "anchored"])
def test_everything_revealed_leaves_no_label_that_was_shown(slots):
    layout = rows(slots, [5, 6, 7, 1], 0)
    revealable = layout.of_blocks(layout.fill) >= 0
    tokens, labels = reveal(layout, revealable, anchored=slots == "anchored")
    left = layout.of_blocks(labels)[layout.of_blocks(labels) != IGNORED].tolist()
    assert left == ([] if slots == "paper" else [1])  # the row of the last token predicts EOS
    nothing, same = reveal(layout, torch.zeros_like(revealable), anchored=slots == "anchored")
    assert torch.equal(nothing, layout.rows.tokens) and torch.equal(same, layout.labels)
