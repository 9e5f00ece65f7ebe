"""Expected acceptance E(A) compared with accepted tokens, on hand-made rounds."""

import numpy as np
import pytest

from benchmarks.expectation import compare_expectation
from drafttrain.decoding.types import Output, Round
from drafttrain.evaluation.bootstrap import draw_resamples


def output_of(*rounds):
    """Returns an output with rounds (expected, accepted), whose last accepted token is cut."""
    played = [
        Round(0, range(9), range(accepted), range(accepted), depth=9, expected=expected, passes=9)
        for expected, accepted in rounds
    ]
    return Output([], played)


OUTPUTS = [
    output_of((0.5, 0), (1.5, 1), (None, 0)),
    output_of((0.5, 1), (2.5, 2), (2.5, 4)),
]


def test_rounds_with_an_expectation_are_counted_and_averaged():
    found = compare_expectation(OUTPUTS, draw_resamples(2, 20))
    assert found.rounds == 5
    assert found.expected == pytest.approx(7.5 / 5)
    assert found.accepted.value == pytest.approx(8 / 5)


def test_correlation_is_pearsons_over_rounds():
    found = compare_expectation(OUTPUTS, draw_resamples(2, 20))
    known = np.corrcoef([0.5, 1.5, 0.5, 2.5, 2.5], [0, 1, 1, 2, 4])[0, 1]
    assert found.correlation.value == pytest.approx(known)
    alone = [np.corrcoef([0.5, 1.5], [0, 1])[0, 1], np.corrcoef([0.5, 2.5, 2.5], [1, 2, 4])[0, 1]]
    assert found.correlation.high == pytest.approx(max(*alone, known))
    assert found.correlation.low == pytest.approx(min(*alone, known))


def test_bins_hold_rounds_of_similar_expectation():
    found = compare_expectation(OUTPUTS, draw_resamples(2, 20), bins=2)
    assert [(one.rounds, one.expected, one.accepted.value) for one in found.bins] == [
        (2, pytest.approx(0.5), pytest.approx(0.5)),
        (3, pytest.approx(6.5 / 3), pytest.approx(7 / 3)),
    ]
    low, high = found.bins[1].accepted.low, found.bins[1].accepted.high
    assert (low, high) == (pytest.approx(1.0), pytest.approx(3.0))  # each prompt by itself
