"""Watched draws are the production ones, and their distances from a boundary are those by hand."""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.watched import Choice, WatchedRandomness

NEAR = 1e-7


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def first_variates(count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=generator())


def watched(kind: str, *found: int) -> WatchedRandomness:
    return WatchedRandomness(generator(), [Choice(kind, found)])


def test_watching_changes_no_draw_and_equal_runs_have_no_distance():
    rows = torch.rand(3, 8, generator=generator(), dtype=torch.float64).softmax(-1)

    def draw(randomness) -> list:
        drawn = [randomness.categorical(rows), randomness.without_replacement(rows, 3)]
        return [one.tolist() for one in drawn] + [randomness.accept_run(rows[0] * 7)]

    seen = WatchedRandomness(generator())
    assert draw(seen) == draw(SampledRandomness(generator()))
    again = WatchedRandomness(generator(), seen.choices)
    assert draw(again) and again.choices == seen.choices and again.distance is None


@pytest.mark.parametrize("side", [1, -1], ids=["behind", "before"])
def test_a_row_is_measured_to_the_nearer_end_of_the_other_part(side):
    at = first_variates(1) - side * NEAR  # the boundary between two tokens
    row = torch.stack([at / 2, at / 2, 1 - at, torch.zeros_like(at)], dim=-1)
    mine, other = (2, 1) if side > 0 else (1, 2)
    near, far = watched("categorical", other), watched("categorical", 0)
    assert near.categorical(row).tolist() == far.categorical(row).tolist() == [mine]
    assert near.distance == pytest.approx(NEAR, abs=1e-12)
    assert far.distance == pytest.approx(float(at / 2) + (side > 0) * NEAR - (side < 0) * NEAR)


def test_a_run_is_measured_at_the_first_event_that_differs():
    probs = first_variates(3) + torch.tensor([0.1, -NEAR, 0.1], dtype=torch.float64)
    randomness = watched("accept_run", 1, 1, 0)
    assert randomness.accept_run(probs) == 1
    assert randomness.distance == pytest.approx(NEAR, abs=1e-12)


def test_draws_without_replacement_are_measured_by_their_perturbed_log_probabilities():
    rows = torch.full((2, 5), 0.2, dtype=torch.float64)
    keys = rows.log() + SampledRandomness(generator()).gumbel(rows)
    [first, second] = keys.topk(3).indices.tolist()
    other = [*first, second[0], second[2], second[1]]
    randomness = watched("without_replacement", *other)
    randomness.without_replacement(rows, 3)
    apart = keys[1, second[1]] - keys[1, second[2]]
    assert randomness.distance == pytest.approx(float(apart))


def test_only_the_first_difference_counts():
    row = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    [mine] = SampledRandomness(generator()).categorical(row).tolist()
    others = [Choice("categorical", (1 - mine,)), Choice("categorical", (5,))]
    randomness = WatchedRandomness(generator(), others)
    randomness.categorical(row)
    distance = randomness.distance
    randomness.categorical(row)
    assert randomness.distance == distance == abs(float(first_variates(1)) - 0.5)


@pytest.mark.parametrize("other", [Choice("accept_run", (1,)), Choice("categorical", (0, 0))])
def test_runs_that_part_between_draws_have_no_distance(other):
    row = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    randomness = WatchedRandomness(generator(), [other, Choice("categorical", (7,))])
    randomness.categorical(row)
    randomness.categorical(row)
    assert randomness.distance is None
