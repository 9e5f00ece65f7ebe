"""Bootstrap intervals over prompts."""

import numpy as np
import pytest

from drafttrain.evaluation.bootstrap import (
    Ratio,
    difference,
    draw_resamples,
    estimate,
    mean,
    median,
    quotient,
    score,
)


def test_each_resample_draws_as_many_prompts_as_there_are():
    resamples = draw_resamples(7, 20, seed=1)
    assert resamples.shape == (20, 7)
    assert (resamples.sum(axis=1) == 7).all()
    with pytest.raises(ValueError, match="0 prompts"):
        draw_resamples(0, 10)


def test_the_interval_covers_the_true_mean_about_95_times_in_100():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        sample = generator.exponential(2.0, size=100)
        found = estimate(mean(sample), draw_resamples(100, 300, seed=trial))
        covered += found.low <= 2.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.98


def test_a_ratio_of_sums_is_not_a_mean_of_ratios():
    ratio = Ratio(np.array([1.0, 30.0]), np.array([1.0, 10.0]))
    found = estimate(ratio, draw_resamples(2, 100))
    assert found.value == pytest.approx(31 / 11)
    assert (found.low, found.high) == pytest.approx((1.0, 3.0))


def test_a_quotient_of_rates_does_not_depend_on_how_much_each_side_did():
    ours = Ratio(np.array([10.0, 50.0]), np.array([1.0, 5.0]))
    theirs = Ratio(np.array([100.0, 20.0]), np.array([20.0, 4.0]))
    found = estimate(quotient(ours, theirs), draw_resamples(2, 100))
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    nothing = Ratio(np.zeros(2), np.zeros(2))
    assert estimate(quotient(ours, nothing), draw_resamples(2, 9)) is None


def test_resamples_with_an_empty_denominator_are_left_out_of_the_interval():
    ratio = Ratio(np.array([0.0, 4.0]), np.array([0.0, 2.0]))
    found = estimate(ratio, draw_resamples(2, 200))
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_a_paired_difference_is_tighter_than_the_systems_own_spread():
    generator = np.random.default_rng(5)
    theirs = generator.normal(0.0, 10.0, size=(200, 1))
    ours = theirs + 1.0 + generator.normal(0.0, 0.1, size=(200, 1))
    both = (score(lambda summed: float(summed[0]) / 200, one) for one in (ours, theirs))
    found = estimate(difference(*both), draw_resamples(200, 500))
    assert 0.9 < found.low < found.value < found.high < 1.1


@pytest.mark.parametrize("count", [7, 8])
def test_the_median_is_that_of_each_resampled_list(count):
    values = np.random.default_rng(2).normal(size=count)
    resamples = draw_resamples(count, 30)
    expected = [np.median(np.repeat(values, drawn.astype(int))) for drawn in resamples]
    assert median(values)(resamples) == pytest.approx(expected)
    assert estimate(median(values), resamples).value == pytest.approx(np.median(values))
