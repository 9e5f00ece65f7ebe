"""Lists whose last batches are not full, by hand."""

import numpy as np
import pytest

from drafttrain.evaluation.stops.waves import beside_rounds, seconds_of_wave, seconds_together

ROUNDS = np.array([2.0, 4.0, 2.0])


def shares(**by_size: float) -> dict[int, np.ndarray]:
    """Each round of a sequence takes so many seconds in batches of a size."""
    return {int(size[1:]): seconds * ROUNDS for size, seconds in by_size.items()}


def test_an_input_that_waits_takes_the_place_of_one_that_ended():
    # two rounds of the first two, two of the last two
    assert seconds_of_wave(shares(b1=1.0, b2=0.6), ROUNDS, [0, 1, 2], 2) == pytest.approx(4.8)


def test_behind_the_last_input_fewer_are_left():
    # two rounds of both, two of one alone
    assert seconds_of_wave(shares(b1=1.0, b2=0.6), ROUNDS, [0, 1], 2) == pytest.approx(4.4)
    assert seconds_of_wave(shares(b1=1.0, b2=0.6), ROUNDS, [1], 2) == pytest.approx(4.0)


def test_calls_of_sizes_between_lie_on_a_line():
    # a round takes 1 s of one, 1.5 s of three, so 1.25 s of two
    known = shares(b1=1.0, b3=0.5)
    assert seconds_together(known, 2) == pytest.approx(0.625 * ROUNDS)
    assert seconds_together(known, 3) == pytest.approx(0.5 * ROUNDS)
    # two rounds of three, two of one
    assert seconds_of_wave(known, ROUNDS, [0, 1, 2], 3) == pytest.approx(3.0 + 2.0)


def test_without_a_smaller_size_a_part_stays_what_it_is():
    assert seconds_together(shares(b2=0.6), 1) == pytest.approx(0.6 * ROUNDS)


def test_one_at_a_time_is_the_sum():
    assert seconds_of_wave(shares(b1=1.0), ROUNDS, [2, 0, 1], 1) == pytest.approx(8.0)


def test_what_sequences_took_beyond_their_rounds():
    measured = np.array([5.0, 2.4, 3.0])
    run = measured, shares(b1=1.0, b2=0.6), ROUNDS
    # 7.4 - 4.4 for two sequences, 3 - 2 for one: 1.5 and 1, of 3.7 and 3 s a sequence
    constant, error = beside_rounds([run], 2, [[0, 1], [2]])
    assert constant == pytest.approx(1.25)
    assert error == pytest.approx((0.25 / 3.7 + 0.25 / 3.0) / 2)
    constant, _ = beside_rounds([run], 2)  # one each: 3, -1.6 and 1
    assert constant == pytest.approx(1.0)
