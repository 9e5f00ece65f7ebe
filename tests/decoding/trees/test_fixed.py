"""Fixed trees: their nodes, and which tree maximises expected acceptance."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import pytest

from drafttrain.decoding.trees.fixed import best_fixed_tree, binary_tree, eagle_tree
from drafttrain.decoding.types import Sampling
from tests.decoding.paths import Path, paths_of
from tests.decoding.toys import LogitsTable
from tests.decoding.trees.growing import START, grown


def test_fixed_trees_have_the_nodes_they_are_made_of():
    assert len(eagle_tree().paths) == 25 and eagle_tree().name == "eagle(25)"
    assert Counter(map(len, eagle_tree().paths)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    assert Counter(map(len, binary_tree(25).paths)) == {1: 2, 2: 4, 3: 8, 4: 11}
    table = LogitsTable(6, 4)
    proposal = grown(binary_tree(6), table, Sampling(), 2)
    likeliest = table[START].topk(2).indices.tolist()
    assert [path for path in paths_of(proposal) if len(path) == 1] == [(t,) for t in likeliest]
    assert Counter(map(len, paths_of(proposal))) == {1: 2, 2: 4}


def subtrees(paths: list[Path], nodes: int) -> Iterator[set[Path]]:
    for chosen in itertools.combinations(paths, nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield set(chosen)


@pytest.mark.parametrize("by_rank", [(0.5, 0.2, 0.1), (0.3, 0.3, 0.3), (0.2, 0.6, 0.05)])
@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_the_best_fixed_tree_expects_as_much_as_any(by_rank, nodes):
    paths = [p for n in (1, 2) for p in itertools.product(range(3), repeat=n)]

    def worth(tree) -> float:
        return sum(math.prod(by_rank[rank] for rank in path) for path in tree)

    best = max(worth(tree) for tree in subtrees(paths, nodes))
    found = best_fixed_tree(by_rank, nodes, depth=2)
    assert worth(found.paths) == pytest.approx(best, abs=1e-12)
    assert len(found.paths) == nodes and max(map(len, found.paths)) <= 2


def test_shares_above_1_are_refused():
    with pytest.raises(ValueError, match="by_rank = "):
        best_fixed_tree((0.9, 0.3), 3, 2)
