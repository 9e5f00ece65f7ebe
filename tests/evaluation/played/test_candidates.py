"""Trees by size and shape, cascades of the drafters named, and which of them are timed."""

from __future__ import annotations

from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.evaluation.played.candidates import timed_of, trees_of
from drafttrain.evaluation.played.increments import Increments
from tests.evaluation.played.pairs import cascade, tree


def settings(temperature: float = 0.0, **changes: object) -> TuneConfig:
    sizes = {"nodes": (4, 8), "levels": (2, 4), "delta": (0.1, 0.3)}
    sampling = SamplingConfig(temperature=temperature)
    return TuneConfig(drafter="large", sampling=sampling, **sizes | changes)


def test_greedy_decoding_tries_chosen_trees_at_every_size_once():
    found = trees_of(settings(trees=("opt-tree", "opt-chain", "rsd-s", "binary", "eagle")), 12)
    assert [one.name for one in found] == [
        "opt-tree(4) gain(0.1,12)",
        "opt-tree(4) gain(0.3,12)",
        "opt-tree(8) gain(0.1,12)",
        "opt-tree(8) gain(0.3,12)",
        "opt-chain(3) gain(0.1,12)",
        "opt-chain(3) gain(0.3,12)",
        "binary(4) k=2",  # it has no more levels
        "binary(8) k=2",
        "binary(8) k=3",
        "eagle(25) k=2",
        "eagle(25) k=4",
    ]
    assert [one.nodes for one in found][:5] == [4, 4, 8, 8, 12] and found[-1].nodes == 25


def test_drawn_trees_spread_their_tokens_over_the_levels():
    found = trees_of(settings(1.0, trees=("rsd-s", "rsd-c", "paths")), 12)
    assert [(one.decode.tree.kind, one.decode.tree.width, one.decode.stop.k) for one in found] == [
        ("rsd-s", 2, 2),
        ("rsd-s", 4, 2),
        ("rsd-s", 2, 4),
        ("rsd-c", 3, 2),
        ("rsd-c", 3, 2),
        ("rsd-c", 3, 4),
        ("paths", 2, 2),
        ("paths", 4, 2),
        ("paths", 2, 4),
    ]
    branching = [one.decode.tree.branching for one in found if one.decode.tree.kind == "rsd-c"]
    assert branching == [(2, 1), (4, 1), (2, 1, 1, 1)]
    assert [one.nodes for one in found] == [4, 8, 8] * 3
    assert {one.verifier for one in found} == {"recursive", "k-seq"}


def test_few_of_each_way_are_timed_and_every_level_of_a_cascade():
    trees = [tree(kind="opt-tree", nodes=nodes) for nodes in (9, 3, 5, 7, 4)]
    matrices = [((5, 0, 0), (0, 0), (0,)), ((4, 0, 0), (0, 0), (0,)), ((6, 0, 0), (3, 0), (0,))]
    others = [((7, 0, 0), (0, 0), (0,)), ((5, 0, 3), (0, 0), (0,))]
    cascades = [cascade(Increments(rows)) for rows in (*matrices, *others)]
    timed = timed_of([*trees, *cascades])
    assert [one.nodes for one in timed if one.kind == "tree"] == [9, 3, 5]
    assert frozenset().union(*(one.uses for one in timed)) == {0, 1, 2}
    assert cascades[-1].uses == {0, 2} and cascades[2].uses == {0, 1}
    assert cascades[2].name == "cascade 6,0,0/3,0/0"
