"""What is timed."""

import pytest

from drafttrain.evaluation.stops.measuring import timed_lengths


@pytest.mark.parametrize(
    ("lengths", "timed"),
    [
        (range(1, 15), [1, 2, 4, 7, 14]),
        ([2, 3, 4, 5, 6, 7, 8, 10], [2, 3, 4, 7, 10]),
        ([8, 2], [2, 8]),
        ([5], [5, 10]),
    ],
)
def test_timed_lengths_lie_closer_where_they_are_short(lengths, timed):
    assert timed_lengths(list(lengths)) == timed
