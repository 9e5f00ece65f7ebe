"""Trees with chosen nodes: which nodes they have, and which are passed to the drafter."""

import itertools
from collections import defaultdict

import pytest
import torch

from drafttrain.decoding.trees.chosen import GREEDY_SCORES, Optimal
from drafttrain.decoding.trees.drawn import Beam, Branching, Paths
from drafttrain.decoding.trees.fixed import binary_tree
from drafttrain.decoding.trees.shapes import Tree
from drafttrain.decoding.types import Sampling
from tests.decoding.decoded import drawn
from tests.decoding.paths import Path, paths_of
from tests.decoding.toys import LogitsTable
from tests.decoding.trees.growing import START, grow, grown


def all_products(table: LogitsTable, temperature: float = 1.0) -> dict[Path, float]:
    """Returns the probabilities of all paths of up to three of four tokens."""
    products: dict[Path, float] = {(): 1.0}
    for length in (1, 2, 3):
        for path in itertools.product(range(4), repeat=length):
            row = (table[(*START, *path[:-1])] / temperature).softmax(-1)
            products[path] = products[path[:-1]] * float(row[path[-1]])
    del products[()]
    return products


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 60])
@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_tree_holds_the_largest_products_of_all(seed, nodes):
    table = LogitsTable(seed, 4)
    growth = Tree(Optimal(nodes), Sampling(1.0), drawn(), ())
    proposal = grow(growth, table, 3)
    products = all_products(table)
    best = sorted(products.values(), reverse=True)[:nodes]
    found = sorted((products[path] for path in paths_of(proposal)), reverse=True)
    assert found == pytest.approx(best, abs=1e-12)
    assert proposal.expected == pytest.approx(sum(best), abs=1e-6)
    for level, expected in enumerate(growth.expected, start=1):
        so_far = [p for path, p in products.items() if len(path) <= level]
        assert expected == pytest.approx(sum(sorted(so_far, reverse=True)[:nodes]), abs=1e-6)


def test_a_greedy_target_is_scored_as_if_the_drafter_were_surer():
    table, sharper = LogitsTable(3, 4), Sampling(GREEDY_SCORES)
    greedy, sharp = (grown(Optimal(7), table, one) for one in (Sampling(), sharper))
    assert paths_of(greedy) == paths_of(sharp)
    assert greedy.expected == pytest.approx(sharp.expected, abs=1e-6)
    plain = grown(Optimal(7), table, Sampling(1.0))
    assert greedy.expected > plain.expected and greedy.depth >= plain.depth


def test_a_tree_can_have_a_temperature_of_its_own():
    table = LogitsTable(3, 4)
    found = grown(Optimal(9, draft_temperature=0.3), table, Sampling())
    scored = all_products(table, 0.3)
    best = sorted(scored, key=scored.__getitem__, reverse=True)[:9]
    assert set(paths_of(found)) == set(best)
    assert found.expected == pytest.approx(sum(scored[path] for path in best), abs=1e-6)


def test_a_node_whose_children_cannot_enter_is_not_computed():
    """One node: the best first token, because no descendant can have a higher score."""
    growth = Tree(Optimal(1), Sampling(), drawn(), ())
    assert growth.grow(LogitsTable(3, 4)[START][None]) == []


def test_a_child_that_ties_its_parent_comes_after_it():
    """Point-mass rows: every product is 1, so the tree is a chain of all levels."""
    sure = defaultdict(lambda: torch.tensor([-torch.inf, -torch.inf, 0.0]))
    proposal = grown(Optimal(5), sure, Sampling())
    assert proposal.tokens.tolist() == [2, 2, 2]
    assert proposal.parents.tolist() == [-1, 0, 1]
    assert proposal.expected == pytest.approx(3.0)


def test_nothing_is_drafted_below_the_end_of_a_sequence():
    table = LogitsTable(2, 3)
    for shape in (Optimal(20), Paths(6), Branching((3, 3)), Beam(6), binary_tree(14)):
        found = paths_of(grown(shape, table, Sampling(1.0), ends={1}))
        assert any(path[-1] == 1 for path in found)
        assert not any(1 in path[:-1] for path in found), shape.name
