"""Temperatures of slots: those that outputs were drawn at are found again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from drafttrain.evaluation.slot_temperatures import (
    COOLEST,
    ROWS_ENOUGH,
    fit_slot_temperatures,
)
from drafttrain.models.spec_drafter.model import UNDRAFTED

VOCABULARY, LENGTH = 20, 50
DRAWN_AT = (0.5, 1.0, 2.0)


def drawn_blocks(outputs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs, and rows from whose temperatures, one a slot, their tokens might have been drawn.

    With `row` where the token of place i was drawn at temperature 1, slot s has DRAWN_AT[s] row.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(outputs):
        rows = 2 * torch.randn(LENGTH + 3, VOCABULARY, generator=generator)
        output = torch.multinomial(rows.softmax(-1), 1, generator=generator)[:LENGTH, 0]
        slots = [rows[slot : slot + LENGTH] * DRAWN_AT[slot] for slot in range(3)]
        yield torch.stack(slots, dim=1), output


def test_temperatures_that_tokens_were_drawn_at_are_found() -> None:
    """To what 400 rows tell: a standard error of some 4 %."""
    assert fit_slot_temperatures(drawn_blocks(20)) == pytest.approx(DRAWN_AT, rel=0.15)


def test_no_more_outputs_are_read_than_needed() -> None:
    blocks = drawn_blocks(100)
    fit_slot_temperatures(blocks)
    assert len(list(blocks)) >= 100 - 2 * ROWS_ENOUGH // LENGTH


def test_a_slot_that_is_always_right_is_as_cool_as_can_be() -> None:
    output = torch.arange(10)
    rows = torch.eye(VOCABULARY)[output][:, None]  # unsure: 1 for 0
    assert fit_slot_temperatures([(rows, output)]) == [pytest.approx(COOLEST, abs=0.02)]


def test_tokens_that_cannot_be_drafted_count_nothing() -> None:
    blocks = list(drawn_blocks(10))
    whole = fit_slot_temperatures(blocks)
    for rows, output in blocks:
        extra = torch.full((LENGTH, 3, 1), UNDRAFTED)
        rows.data = torch.cat((rows, extra), dim=-1)
        output[-1] = VOCABULARY
    assert fit_slot_temperatures(blocks) == pytest.approx(whole, rel=0.1)


def test_a_slot_that_no_output_reaches_is_as_the_one_before() -> None:
    [(rows, output)] = drawn_blocks(1)
    found = fit_slot_temperatures([(rows[:2], output[:2])])
    assert found[2] == found[1]
