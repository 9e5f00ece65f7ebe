"""The enumeration itself, compared with hand-computed probabilities."""

import pytest
import torch

from tests.decoding.enumeration import enumerate_law, enumerate_outcomes, total_variation


def test_every_outcome_is_visited_once_with_its_probability():
    first, second = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.0, 0.5]])

    def run(randomness):
        if int(randomness.categorical(first)) == 0:
            return ("low",)
        return ("high", int(randomness.categorical(second)))

    assert sorted(enumerate_outcomes(run)) == [
        (("high", 0), 0.375),
        (("high", 2), 0.375),
        (("low",), 0.25),
    ]


def test_rows_are_drawn_independently_and_runs_stop_at_the_first_rejection():
    rows = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    pairs = enumerate_law(lambda randomness: tuple(randomness.categorical(rows).tolist()))
    assert pairs == pytest.approx({(0, 0): 0.1, (0, 1): 0.4, (1, 0): 0.1, (1, 1): 0.4})
    runs = enumerate_law(lambda randomness: randomness.accept_run(torch.tensor([0.5, 1.0, 0.2])))
    assert runs == pytest.approx({0: 0.5, 2: 0.4, 3: 0.1})


def test_total_variation_is_half_the_summed_difference():
    assert total_variation({"a": 1.0}, {"a": 0.25, "b": 0.75}) == 0.75
