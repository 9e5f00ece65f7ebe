"""EWIF: by hand, by simulation, and as the CS Drafting paper's tables have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ewif import (
    expected_improvement,
    expected_improvement_of_chain,
    horizontal_improvement,
)

SMALL, BASE = 77e6 / 11.3e9, 250e6 / 11.3e9
"""Costs as parameters over those of FLAN-T5-XXL."""
CNNDM = {"small": 0.65, "base": 0.73}
ENDE = {"small": 0.75, "base": 0.80}
"""Acceptance at temperature 0 (Leviathan et al. 2023, Table 3)."""
shares = st.floats(0.0, 1.0)
costs = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("alphas", "base", "small", "expected"),
    [
        (CNNDM, 0, 9, 2.65),
        (CNNDM, 8, 0, 2.96),
        (CNNDM, 5, 3, 3.03),
        (ENDE, 0, 12, 3.61),
        (ENDE, 11, 0, 3.75),
        (ENDE, 5, 8, 3.93),
    ],
)
def test_the_six_rows_of_table_1(alphas, base, small, expected):
    found = horizontal_improvement([(alphas["base"], BASE, base), (alphas["small"], SMALL, small)])
    assert found == pytest.approx(expected, abs=0.01)


def test_by_hand():
    """Two tokens, each accepted half the time, each a tenth of a target call: 1.75 / 1.2."""
    assert expected_improvement([0.5, 0.5], [0.1, 0.1]) == pytest.approx(1.75 / 1.2)
    assert expected_improvement([], []) == 1.0
    assert expected_improvement([1.0, 1.0], [0.0, 0.0]) == 3.0


@given(shares, costs, st.integers(0, 12))
def test_equal_drafters_are_the_closed_form_of_one(alpha, cost, k):
    whole = expected_improvement([alpha] * k, [cost] * k)
    assert expected_improvement_of_chain(alpha, cost, k) == pytest.approx(whole, rel=1e-6)


@given(
    st.lists(st.tuples(shares, costs), min_size=1, max_size=6),
    shares,
    costs,
    st.integers(0, 5),
    shares,
)
def test_theorem_4_4_a_mixture_of_two_drafters_is_never_better_than_both(
    rest, alpha, cost, place, mixed
):
    """Position r drafted by either with a probability: EWIF is at most that of the better one."""
    place = min(place, len(rest) - 1)

    def at(a: float, c: float) -> float:
        chosen = [*rest[:place], (a, c), *rest[place + 1 :]]
        return expected_improvement([a for a, _ in chosen], [c for _, c in chosen])

    other_alpha, other_cost = rest[place]
    mixture = at(mixed * alpha + (1 - mixed) * other_alpha, mixed * cost + (1 - mixed) * other_cost)
    assert mixture <= max(at(alpha, cost), at(other_alpha, other_cost)) + 1e-12
