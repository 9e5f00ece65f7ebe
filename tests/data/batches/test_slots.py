"""Glancing reveals as many slots as the rule says, and takes their labels out of the loss."""

from __future__ import annotations

import pytest
import torch

from drafttrain.data.batches.slots import choose_revealed, glancing_ratio, reveal
from drafttrain.models.spec_drafter.model import SpecDrafterConfig
from drafttrain.models.spec_drafter.slots import IGNORED, lay_out


def test_ratio_falls_linearly_and_ends_exactly() -> None:
    assert glancing_ratio(0.5, 0.3, 0.0) == 0.5
    assert glancing_ratio(0.5, 0.3, 0.5) == pytest.approx(0.4)
    assert glancing_ratio(0.5, 0.3, 1.0) == 0.3


@pytest.mark.parametrize(("wrong", "ratio", "expected"), [(5, 0.5, 2), (1, 0.5, 0), (4, 1.0, 4)])
def test_floor_of_the_share_is_revealed(wrong: int, ratio: float, expected: int) -> None:
    revealable = torch.tensor([[[True] * 5 + [False] * 3]])
    revealed = choose_revealed(torch.tensor([[wrong]]), revealable, torch.rand(1, 1, 8), ratio)
    assert revealed.sum() == expected
    assert not (revealed & ~revealable).any()


def test_choice_is_uniform_over_the_slots() -> None:
    torch.manual_seed(0)
    priority = torch.rand(4000, 1, 4)
    revealable = torch.ones(4000, 1, 4, dtype=torch.bool)
    revealed = choose_revealed(torch.full((4000, 1), 4), revealable, priority, 0.5)
    share = revealed.float().mean(0)[0]
    assert (share - 0.5).abs().max() < 0.03


def config(slots: str) -> SpecDrafterConfig:
    return SpecDrafterConfig(vocab_size=10, k=4, mask_id=9, decoder_start_token_id=0, slots=slots)


def test_revealed_paper_slot_shows_its_token_and_loses_its_label() -> None:
    layout = lay_out(
        torch.tensor([[5, 6, 7, 8, 1]]), torch.tensor([5]), torch.tensor([[1]]), config("paper")
    )
    tokens, labels = reveal(layout, torch.tensor([[[False, True, False, False]]]), anchored=False)
    assert layout.of_blocks(tokens).tolist() == [[[9, 7, 9, 9]]]
    assert layout.of_blocks(labels).tolist() == [[[6, IGNORED, 8, 1]]]


def test_revealed_anchored_slot_takes_the_label_of_the_row_before_it() -> None:
    layout = lay_out(
        torch.tensor([[5, 6, 7, 8, 1]]), torch.tensor([5]), torch.tensor([[1]]), config("anchored")
    )
    tokens, labels = reveal(layout, torch.tensor([[[False, True, False]]]), anchored=True)
    assert layout.of_blocks(tokens).tolist() == [[[9, 7, 9]]]
    assert layout.of_blocks(labels).tolist() == [[[IGNORED, 8, 1]]]  # 7 is given, 8 is not
    assert layout.of_prefix(labels).tolist() == [[5, 6, 7, 8, 1]]


@pytest.mark.parametrize("slots", ["paper", "anchored"])
def test_everything_revealed_leaves_no_label_that_was_shown(slots: str) -> None:
    layout = lay_out(
        torch.tensor([[5, 6, 7, 1]]), torch.tensor([4]), torch.tensor([[0]]), config(slots)
    )
    revealable = layout.of_blocks(layout.fill) >= 0
    tokens, labels = reveal(layout, revealable, anchored=slots == "anchored")
    left = layout.of_blocks(labels)[layout.of_blocks(labels) != IGNORED].tolist()
    assert left == ([] if slots == "paper" else [1])  # the row of the last token predicts EOS
    nothing, same = reveal(layout, torch.zeros_like(revealable), anchored=slots == "anchored")
    assert torch.equal(nothing, layout.rows.tokens) and torch.equal(same, layout.labels)
