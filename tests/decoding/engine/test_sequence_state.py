"""Tokens in cache columns: what is kept after tokens changed, and what is copied."""

from collections.abc import Sequence

import pytest
import torch

from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.types import Source

NOTHING = torch.empty(0, dtype=torch.long)


class Moves:
    """Columns that record the operations on them."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, list[int]]] = []

    def open(self, owner: object) -> int:
        return 0

    def move(self, row: int, first: int, columns: Sequence[int]) -> None:
        self.moved.append((first, list(columns)))


def state_of(tokens: Sequence[int]) -> SequenceState:
    state = SequenceState(Moves(), Source.of_text(NOTHING, NOTHING))
    state.append(tokens, range(len(tokens)), is_chain=True)
    return state


@pytest.mark.parametrize("length", [1, 2, 5, 300])
def test_align_keeps_the_common_prefix(length):
    known = list(range(1000, 1000 + length))
    for place in range(length):
        state = state_of(known)
        now = [*known[:place], 7, *known[place + 1 :], 8]
        assert state.align(torch.tensor(now)) == now[place:]
        assert state.tokens == known[:place]


def test_the_last_token_is_computed_again_though_it_is_cached():
    state = state_of([5, 6, 7])
    assert state.align(torch.tensor([5, 6, 7])) == [7]
    assert state.align(torch.tensor([5])) == [5]
    assert state.tokens == []


def test_columns_that_are_not_there_cannot_be_kept():
    with pytest.raises(AssertionError, match="fewer columns are cached"):
        state_of([5, 6]).forget(3)


def test_only_columns_that_change_their_place_are_copied():
    state = state_of([5, 6])
    state.append([10, 11, 12, 13], [2, 3, 3, 4], is_chain=False)
    state.gather(2, [2, 4, 5])
    assert state.kv_cache.moved == [(3, [4, 5])]
    assert (state.tokens, state.positions) == ([5, 6, 10, 12, 13], [0, 1, 2, 3, 4])
    assert state.chain == state.cached == 5
