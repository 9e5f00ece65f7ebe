"""Counts of rounds by hand, and known costs recovered from their clocks."""

from __future__ import annotations

import numpy as np
import pytest

from drafttrain.decoding.types import Calls, Output, Round
from drafttrain.evaluation.played.costs import MethodCosts, check_asked, method_costs
from drafttrain.evaluation.played.counts import DRAFTING, count_output
from drafttrain.evaluation.runner import Decoded
from drafttrain.evaluation.stops.round_costs import Curve

TREE = Round(0, [5, 6, 7, 8], [0, 2], [5, 7, 9], passes=2, depth=2)
CHAIN = Round(0, [5, 6], [], [4], 3, calls={"small": Calls(2, 0.0), "max-gram": Calls(1, 0.0)})
LAST = Round(0, [], [], [1])


def test_what_is_counted_of_rounds():
    counts = count_output(Output(rounds=[TREE, CHAIN, LAST]), 10, ["small", "max-gram"])
    # 10 tokens in front of the tree, 13 of the chain, 14 of the last token
    found = {name: float(getattr(counts, name)[0, 0]) for name in ("tokens", "rounds", "drafted")}
    assert found == {"tokens": 5, "rounds": 3, "drafted": 6}
    assert counts.accepted == 2 and counts.history == 37 and counts.sequences == 1
    assert counts.by_rows[0, 0].tolist() == [0, 1, 0, 1, 0, 1]
    names = [*DRAFTING, "small", "max-gram"]
    assert dict(zip(names, counts.drafting[0, 0].tolist(), strict=True)) == {
        "rounds": 2,
        "passes": 5,
        "levels": 4,
        "tokens": 6,
        "history": 2 * 10 + 3 * 13,
        "small": 2,
        "max-gram": 1,
    }


def test_a_prompt_costs_the_sum_of_its_counts():
    counts = count_output(Output(rounds=[TREE, LAST]), 10)
    drafting = dict.fromkeys(DRAFTING, 0.0) | {"passes": 2.0, "tokens": 0.5}
    costs = MethodCosts("opt-tree", 1, drafting, Curve(10.0, (1.0,), (1.0,), 0.1), 7.0, 0.0)
    # drafting 4 + 2; judging 5 rows and 1 with 10 and 13 tokens in front: 14 + 10 + 2.3
    assert costs.seconds(counts, 0)[0] == pytest.approx(6 + 26.3 + 7)


def tree_round(generator: np.random.Generator, nodes: int, before: int) -> Round:
    levels = int(generator.integers(2, 7))
    return Round(
        0,
        [4] * nodes,
        [0],
        [4, 4],
        passes=levels,
        depth=levels,
        draft_seconds=0.001 + 0.002 * levels + 0.0001 * nodes,
        target_seconds=0.02 + 0.0003 * (nodes + 1) + 1e-5 * before,
    )


def runs_of(sizes: tuple[int, ...]) -> list[Decoded]:
    generator = np.random.default_rng(0)
    runs = []
    for nodes in sizes:
        outputs = []
        for _ in range(4):
            rounds = [tree_round(generator, nodes, 20 + 2 * place) for place in range(12)]
            outputs.append(Output([4] * 24, rounds))
        seconds = [
            0.05 + sum(r.draft_seconds + r.target_seconds for r in one.rounds) for one in outputs
        ]
        runs.append(Decoded("t", "opt-tree", None, outputs, np.array([seconds])))
    return runs


def test_known_costs_of_trees_are_recovered_and_price_a_size_between():
    costs = method_costs(runs_of((8, 30)), [20] * 4, (), "opt-tree", 1)
    assert costs.constant == pytest.approx(0.05, rel=1e-4) and costs.error < 1e-4
    [between] = runs_of((16,))
    counts = [count_output(output, 20) for output in between.outputs]
    priced = [costs.seconds(one, 0)[0] for one in counts]
    np.testing.assert_allclose(priced, between.seconds[0], rtol=1e-4)


def test_a_drafter_that_was_never_asked_has_no_cost():
    run = Decoded("c", "cascade", None, [Output(rounds=[CHAIN])], np.array([[1.0]]))
    check_asked(["small", "max-gram"], [run])
    with pytest.raises(ValueError, match="'base' made no call .* raise sampling.max_new_tokens"):
        check_asked(["small", "base"], [run])


def test_costs_of_nothing_drafted_are_refused():
    run = Decoded("t", "opt-tree", None, [Output(rounds=[LAST, LAST])], np.array([[1.0]]))
    with pytest.raises(ValueError, match="no timed round of 'opt-tree' drafted anything"):
        method_costs([run], [3], (), "opt-tree", 1)
