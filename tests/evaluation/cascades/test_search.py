"""The search: who goes on, who sees which prompts, and optima that are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drafttrain.decoding.drafters.cascade import Level
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.types import Output, Sampling
from drafttrain.evaluation.cascades.candidates import Candidate, kind_of, neighbours, propose
from drafttrain.evaluation.cascades.search import (
    CascadeReplay,
    Halving,
    Rung,
    search,
    search_around,
)
from tests.evaluation.cascades.replays import ToyReplay, prompts_of, target_of, toy

COSTS = {"toy": 0.0}


def test_the_better_half_goes_on_and_few_see_all_prompts():
    replay, candidates = ToyReplay(), [toy(length) for length in range(1, 33)]
    found = search(candidates, 60, replay, COSTS, Halving(first=4, finalists=4))
    # 32 -> 16 and the two of the regrets -> 9 and they -> 6 and they -> 4 and they
    assert found.rungs == [Rung(4, 32), Rung(8, 18), Rung(16, 11), Rung(32, 8), Rung(60, 6)]
    assert replay.seen == [
        (prompt, next(rung.candidates for rung in found.rungs if prompt < rung.prompts))
        for prompt in range(60)
    ]
    assert found.best == toy(32)
    # the default, and the first level alone at its better length
    assert {one.longest for one in found.finished} == {32, 31, 30, 29, 1, 3}
    assert {len(outputs) for outputs in found.outputs.values()} == {4, 8, 16, 32, 60}


def test_with_few_prompts_all_candidates_see_all():
    found = search([toy(1), toy(3), toy(2)], 3, ToyReplay(), COSTS, Halving(first=8))
    assert found.rungs == [Rung(3, 3)]
    assert found.best == toy(3)


def test_neighbours_that_are_better_take_the_place_of_the_best():
    replay = ToyReplay()
    found = search([toy(1), toy(3), toy(5)], 4, replay, COSTS, Halving())
    near = neighbours(found.best, ("model",))
    around = search_around(found, near, 4, replay, COSTS)
    assert found.best == toy(5)
    assert around.best == toy(7) and around.best.origin == "neighbour"
    assert around.rungs[-1] == Rung(4, 3)  # 3 is known
    assert len(around.outputs[toy(4)]) == 4


def test_a_neighbour_that_stopped_early_sees_all_prompts():
    replay = ToyReplay()
    candidates = [toy(1), *(toy(length) for length in range(4, 20))]
    found = search(candidates, 9, replay, COSTS, Halving(first=2, finalists=1))
    near = [toy(4), toy(18)]
    assert len(found.outputs[toy(4)]) == 2
    around = search_around(found, near, 9, replay, COSTS)
    assert len(around.outputs[toy(4)]) == len(around.outputs[toy(18)]) == 9


@pytest.fixture(scope="module")
def perfect_and_useless() -> list[Level]:
    """A drafter that is the target, and one that is never right."""
    target = target_of("llama")
    useless = target_of("qwen2")
    names = {"perfect": target, "useless": useless}
    return [Level(name, CausalDrafter(model)) for name, model in names.items()]


def test_a_cheap_drafter_that_is_always_right_drafts_long_and_alone(perfect_and_useless):
    """Its SWI is (k + 1) / (1 + 0.01 k), which rises with k; the other one only costs."""
    levels, prompts = perfect_and_useless, prompts_of("llama")[:2]
    replay = CascadeReplay(target_of("llama"), levels, Sampling(), 30, seed=0)
    kinds = [kind_of(level) for level in levels]
    candidates = propose(kinds, ((5, 5), (5,)), (1.0,), 16, seed=0)

    def replayed(prompt: int, some: Sequence[Candidate]) -> list[Output]:
        return replay.replay(prompts[prompt], some)

    named = {"perfect": 0.01, "useless": 0.05}
    found = search(candidates, len(prompts), replayed, named, Halving(first=1, finalists=2))
    near = neighbours(found.best, kinds)
    best = search_around(found, near, len(prompts), replayed, named).best
    (perfect, useless), (reviewed,) = best.increments
    assert perfect >= 12
    assert useless == reviewed == 0


def test_a_drafter_that_costs_as_much_as_the_target_drafts_little(perfect_and_useless):
    """With c = 1 a perfect drafter's SWI is (k + 1) / (1 + k) = 1 whatever k; a cheap one that is
    never right has less than 1. No cascade of the two gains anything."""
    levels, prompts = perfect_and_useless, prompts_of("llama")[:2]
    replay = CascadeReplay(target_of("llama"), levels, Sampling(), 30, seed=0)
    named = {"perfect": 1.0, "useless": 0.05}
    candidates = [Candidate(((2, 0), (0,))), Candidate(((0, 3), (0,))), Candidate(((4, 2), (3,)))]

    def replayed(prompt: int, some: Sequence[Candidate]) -> list[Output]:
        return replay.replay(prompts[prompt], some)

    found = search(candidates, 2, replayed, named, Halving())
    assert found.best == candidates[0]
