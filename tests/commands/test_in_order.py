"""Rounds of several sequences, given out one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from drafttrain.commands.in_order import InOrder
from drafttrain.decoding.types import Round


def decoded(lengths: list[int], batch_size: int) -> Iterator[Round]:
    """Rounds as a decoder yields them: one of every sequence under way, in turn."""
    left, waiting, active = list(lengths), list(range(len(lengths))), []
    while waiting or active:
        while waiting and len(active) < batch_size:
            active.append(waiting.pop(0))
        for number in active:
            left[number] -= 1
            token = lengths[number] - left[number]
            yield Round(number, [], [], [token], finished=left[number] == 0)
        active = [number for number in active if left[number] > 0]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 5))
def test_every_sequence_gets_its_own_rounds_in_order(lengths, batch_size):
    whole = InOrder(decoded(lengths, batch_size), len(lengths), batch_size)
    for number, sequence in enumerate(whole):
        rounds = list(sequence)
        assert [one.sequence for one in rounds] == [number] * lengths[number]
        assert [one.emitted for one in rounds] == [[i + 1] for i in range(lengths[number])]
        assert sequence.seconds >= 0


def test_the_first_sequence_is_not_kept_waiting():
    seen = []

    def watched() -> Iterator[Round]:
        for played in decoded([3, 1, 2], 2):
            seen.append(played.sequence)
            yield played

    first, second, third = InOrder(watched(), 3, 2)
    rounds = iter(first)
    next(rounds)
    assert seen == [0], "nothing is decoded ahead of what is shown"
    next(rounds)
    assert seen == [0, 1, 0]
    list(rounds), list(second), list(third)
    assert seen == [0, 1, 0, 2, 0, 2]


def test_what_is_under_way_is_known():
    whole = InOrder(decoded([2, 1, 1], 2), 3, 2)
    assert whole.under_way == []
    first, *_ = whole
    next(iter(first))
    assert whole.under_way == [0, 1]
    list(first)
    assert 1 not in whole.under_way and 0 not in whole.under_way
