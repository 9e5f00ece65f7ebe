"""Incrementss: matrices that draft the same are one, and random ones follow from the seed."""

from __future__ import annotations

import numpy as np
import pytest

from drafttrain.evaluation.played.increments import (
    Increments,
    _random,
    neighbours,
    propose,
    simplify,
)
from tests.evaluation.played.pairs import GREEDY, SAMPLED, cascade, facts, player_of, prompts_of

THREE = ("model", "model", "max-gram")
DEFAULT = ((5, 5, 0), (5, 10), (10,))


def parse(text: str, leniency: float = 1.0) -> Increments:
    rows = text.split("/")
    return Increments(tuple(tuple(map(int, row.split(","))) for row in rows), leniency)


@pytest.mark.parametrize(
    ("kinds", "given", "least"),
    [
        # nothing drafts in the first row that could ask for reviews
        (("model", "max-gram"), "0,3/9", "0,3/0"),
        (("block", "max-gram"), "4,3/9", "4,3/0"),
        # reviews for 4 tokens ask for 3, as each adds one
        (("model", "max-gram"), "4,0/10", "4,0/3"),
        # one token leaves no room to review
        (("model", "max-gram"), "1,2/10", "1,2/0"),
        # the second level fills the reviews of the first, so that max-gram has no turn there
        (THREE, "4,0,0/3,5/9", "4,0,0/3,0/2"),
        (THREE, "4,0,0/5,5/1", "4,0,0/3,0/1"),
        # in the second level's own reviews it has: for 6 tokens, 5
        (THREE, "4,6,0/3,9/9", "4,6,0/3,5/2"),
        (THREE, "5,5,0/5,10/10", "5,5,0/4,4/3"),
    ],
)
def test_increments_that_nothing_asks_for_become_zero(kinds, given, least):
    assert simplify(parse(given), kinds) == parse(least)
    assert simplify(parse(least), kinds) == parse(least)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_simplified_matrices_draft_the_same(sampling):
    generator, player = np.random.default_rng(7), player_of("llama", sampling)
    prompt, changed = prompts_of("llama")[0], 0
    for _ in range(12):
        candidate = _random(THREE, (1.0, 2.0), generator)
        least = simplify(candidate, THREE)
        if not candidate.longest:
            continue
        changed += least != candidate
        first, second = player.play(
            prompt, [cascade(candidate, sampling), cascade(least, sampling)]
        )
        assert facts(first) == facts(second), (candidate.name, least.name)
    assert changed >= 6


def test_leniency_counts_only_where_a_model_reviews_a_model():
    assert simplify(parse("5,0/4", 3.0), ("model", "max-gram")).leniency == 1.0
    assert simplify(parse("5,0,0/3,0/0", 3.0), THREE).leniency == 3.0
    assert simplify(parse("5,0,0/0,4/0", 3.0), THREE).leniency == 1.0
    assert simplify(parse("1,5,0/3,0/0", 3.0), THREE).leniency == 1.0


def test_proposals_differ_and_begin_with_the_usual_ones():
    found = propose(THREE, DEFAULT, (1.0, 1.5), 64, seed=0)
    assert len(found) == len(set(found)) == 64
    assert found[0] == simplify(Increments(DEFAULT), THREE)
    assert found[1] == parse("0,0,10/0,0/0")
    assert found[2] == simplify(Increments(DEFAULT, 1.5), THREE)
    assert {one.leniency for one in found} == {1.0, 1.5}
    assert all(one.longest and simplify(one, THREE) == one for one in found)


def test_proposals_follow_from_the_seed():
    first, again, other = (propose(THREE, DEFAULT, (1.0,), 40, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_where_there_are_few_matrices_all_are_proposed():
    found = propose(("model",), ((5,),), (1.0,), 64, seed=0)
    assert {one.increments[0][0] for one in found} == {*range(1, 9)}


def test_neighbours_differ_in_one_increment_by_one_or_two():
    best = parse("4,1/2")
    near = {one.name for one in neighbours(best, ("model", "max-gram"))}
    # 2,1/2 leaves room for 1 in reviews; 4,1/4 for 3
    assert near == {
        "2,1/1",
        "3,1/2",
        "5,1/2",
        "6,1/2",
        "4,0/2",
        "4,2/2",
        "4,3/2",
        "4,1/0",
        "4,1/1",
        "4,1/3",
    }
