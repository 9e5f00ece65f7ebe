"""Shapes of draft trees: which nodes they hold, in which order, and how likely each tree is."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.sampling import SampledChance, warp
from drafttrain.decoding.tree_shapes import (
    GREEDY_SCORES,
    Beam,
    Branching,
    Fixed,
    Growth,
    Optimal,
    Paths,
    best_fixed_tree,
    binary_tree,
    eagle_tree,
    perturb,
)
from drafttrain.decoding.tree_verifiers import RecursiveRejection, TargetWalk
from drafttrain.decoding.types import Chance, Proposal, Sampling
from tests.decoding.enumeration import EnumeratedChance, enumerate_law
from tests.decoding.toys import LogitsTable

START = (0,)
Path = tuple[int, ...]


def grow(growth: Growth, table: LogitsTable, levels: int) -> Proposal:
    """Grow a tree on the rows of a table, as a session does."""
    fed = [-1]
    for _ in range(levels):
        paths = [(*START, *path_of(growth, node)) for node in fed]
        rows = torch.stack([table[path] for path in paths])
        fed = growth.grow(rows, torch.zeros(len(rows), 1))
        if not fed:
            break
    return growth.proposal(levels)


def path_of(growth: Growth, node: int) -> Path:
    if node < 0:
        return ()
    return (*path_of(growth, growth.tree.parents[node]), growth.tree.tokens[node])


def paths_of(proposal: Proposal) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def sampled(seed: int = 0) -> SampledChance:
    return SampledChance(torch.Generator().manual_seed(seed))


# --- independent paths ---------------------------------------------------------------------------


def test_equal_beginnings_of_paths_are_one_node_with_a_count():
    table, sampling = LogitsTable(1, 2), Sampling(1.0)
    proposal = grow(Paths(5).plant(sampling, sampled(), ()), table, 3)
    paths, counts = paths_of(proposal), proposal.counts.tolist()
    assert len(set(paths)) == len(paths)
    known = dict(zip(paths, counts, strict=True))
    for depth in (1, 2, 3):
        assert sum(c for path, c in known.items() if len(path) == depth) == 5
    for path, count in known.items():
        below = sum(c for p, c in known.items() if p[:-1] == path)
        assert below == (count if len(path) < 3 else 0)


def test_paths_have_the_law_of_independent_draws():
    """One level, two paths: pairs of draws, unordered."""
    table, sampling = LogitsTable(1, 3), Sampling(1.0)
    probs = warp(table[START], sampling)

    def run(chance: Chance) -> tuple:
        proposal = grow(Paths(2).plant(sampling, chance, ()), table, 1)
        pairs = zip(proposal.tokens.tolist(), proposal.counts.tolist(), strict=True)
        return tuple(sorted(t for token, count in pairs for t in [token] * count))

    law = enumerate_law(run)
    for a, b in itertools.combinations_with_replacement(range(3), 2):
        expected = float(probs[a] * probs[b]) * (1 if a == b else 2)
        assert law[a, b] == pytest.approx(expected, abs=1e-12)


# --- without replacement -------------------------------------------------------------------------


def test_siblings_come_in_the_order_drawn_and_never_twice():
    """Plackett-Luce: P(a, b) = p_a p_b / (1 - p_a)."""
    table, sampling = LogitsTable(3, 4), Sampling(1.0)
    probs = warp(table[START], sampling)

    def run(chance: Chance) -> Path:
        return tuple(grow(Branching((2,)).plant(sampling, chance, ()), table, 1).tokens.tolist())

    law = enumerate_law(run)
    for a, b in itertools.permutations(range(4), 2):
        expected = float(probs[a] * probs[b] / (1 - probs[a]))
        assert law[a, b] == pytest.approx(expected, abs=1e-12)
    assert len(law) == 12


def test_the_generators_order_has_the_law_that_is_enumerated():
    table, sampling, runs = LogitsTable(3, 3), Sampling(1.0), 4000
    probs = warp(table[START], sampling)
    drawn = sampled().without_replacement(probs.expand(runs, -1), 2).tolist()
    counts = Counter(map(tuple, drawn))
    for a, b in itertools.permutations(range(3), 2):
        p = float(probs[a] * probs[b] / (1 - probs[a]))
        assert abs(counts[a, b] / runs - p) < 5 * math.sqrt(p * (1 - p) / runs)


@pytest.mark.parametrize("chance", [sampled(), EnumeratedChance()], ids=["drawn", "enumerated"])
def test_a_row_with_fewer_tokens_than_siblings_gives_those_it_has(chance: Chance):
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    drawn = chance.without_replacement(probs, 3).tolist()
    assert drawn[0] == [1, -1, -1]
    assert sorted(drawn[1][:2]) == [0, 2] and drawn[1][2] == -1
    table, sampling = LogitsTable(3, 3), Sampling(1.0, top_k=2)
    proposal = grow(Branching((3, 3)).plant(sampling, sampled(), ()), table, 2)
    assert len(proposal.tokens) == 2 + 2 * 2


def test_levels_have_their_own_widths():
    table = LogitsTable(3, 5)
    proposal = grow(Branching((3, 2, 1)).plant(Sampling(1.0), sampled(), ()), table, 3)
    assert Counter(map(len, paths_of(proposal))) == {1: 3, 2: 6, 3: 6}
    assert Branching((3, 2, 1)).name == "rsd-c(3,2,1)"


# --- stochastic beams ----------------------------------------------------------------------------


def beam_trees(
    table: LogitsTable, sampling: Sampling, width: int, end: int | None = None
) -> dict[tuple, float]:
    """The law of RSD-S trees of two levels, by the Plackett-Luce order of all leaf sequences.

    The perturbed log-probability of a prefix is the largest of its leaves', so each level holds the
    first `width` different prefixes in that order, the second below the first only. Leaves that
    can add no node are passed over. A token that ends a sequence is a leaf by itself.
    """
    first = warp(table[START], sampling)
    leaves: dict[Path, float] = {}
    for a in range(len(first)):
        if a == end:
            leaves[(a,)] = float(first[a])
        elif first[a] > 0:
            row = warp(table[(*START, a)], sampling)
            leaves |= {(a, b): float(first[a] * row[b]) for b in range(len(first))}
    leaves = {leaf: p for leaf, p in leaves.items() if p > 0.0}
    law: dict[tuple, float] = {}

    def go(above: tuple[int, ...], below: tuple[Path, ...], probability: float) -> None:
        adding = {}
        for leaf, p in leaves.items():
            new_above = leaf[0] not in above and len(above) < width
            reached = leaf[0] in above or new_above
            new_below = len(leaf) == 2 and leaf not in below and len(below) < width and reached
            if new_above or new_below:
                adding[leaf] = (p, new_above, new_below)
        if not adding:
            law[above, below] = law.get((above, below), 0.0) + probability
            return
        total = sum(p for p, _, _ in adding.values())
        for leaf, (p, new_above, new_below) in adding.items():
            more_above = (*above, leaf[0]) if new_above else above
            go(more_above, (*below, leaf) if new_below else below, probability * p / total)

    go((), (), 1.0)
    return law


def beam_proposal(above, below, table: LogitsTable, sampling: Sampling) -> Proposal:
    rows = [(), *((a,) for a in above)]
    return Proposal(
        tokens=torch.tensor([*above, *(leaf[1] for leaf in below)]),
        parents=torch.tensor([-1] * len(above) + [above.index(leaf[0]) for leaf in below]),
        draw="without_replacement",
        draft_probs=torch.stack([warp(table[(*START, *row)], sampling) for row in rows]),
        rows=torch.tensor([0] * len(above) + [1 + above.index(leaf[0]) for leaf in below]),
    )


@pytest.mark.parametrize("end", [None, 1], ids=["endless", "a token ends"])
@pytest.mark.parametrize("verifier", [RecursiveRejection, TargetWalk], ids=lambda v: v.name)
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize(
    ("sampling", "excluded"),
    [(Sampling(1.0), 0.0), (Sampling(1.3, top_k=2), 0.0), (Sampling(1.5, top_p=0.8), 0.4)],
    ids=["temperature 1", "top-k", "top-p, supports apart"],
)
def test_stochastic_beams_are_exact(width, sampling, excluded, verifier, end):
    target, draft = LogitsTable(1, 3, excluded), LogitsTable(2, 3, excluded)
    law = torch.zeros(3, 3, dtype=torch.float64)
    trees = beam_trees(draft, sampling, width, end)
    assert sum(trees.values()) == pytest.approx(1.0, abs=1e-12)
    if width == 3 and sampling == Sampling(1.0) and end is None:
        assert len(trees) == 522
    for (above, below), likely in trees.items():
        proposal = beam_proposal(above, below, draft, sampling)
        rows = [target[START], *(target[(*START, *path)] for path in paths_of(proposal))]

        def play(chance: Chance, proposal=proposal, rows=rows) -> Path:
            verdict = verifier.verify(proposal, torch.stack(rows), sampling, chance)
            return (*proposal.tokens[verdict.path].tolist(), verdict.next_token)

        for tokens, probability in enumerate_law(play).items():
            if len(tokens) == 1:
                after = warp(target[(*START, *tokens)], sampling)
                law[tokens[0]] += likely * probability * after
            else:
                law[tokens[:2]] += likely * probability
    first = warp(target[START], sampling)
    plain = torch.stack([p * warp(target[(*START, t)], sampling) for t, p in enumerate(first)])
    assert (law - plain).abs().max() < 1e-12


@pytest.mark.parametrize("end", [None, 1], ids=["endless", "a token ends"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_float_sampler_has_the_law_that_is_enumerated(width, end):
    table, sampling, runs, chance = LogitsTable(2, 3), Sampling(1.0), 3000, sampled()
    law, ends = beam_trees(table, sampling, width, end), {end}
    counts: Counter[tuple] = Counter()
    for _ in range(runs):
        found = paths_of(grow(Beam(width).plant(sampling, chance, ends), table, 2))
        above = tuple(path[0] for path in found if len(path) == 1)
        counts[above, tuple(path for path in found if len(path) == 2)] += 1
    assert set(counts) <= set(law)
    for tree, p in law.items():
        rare = 4 / runs  # trees of which none or a few are expected
        assert abs(counts[tree] / runs - p) < 5 * math.sqrt(p * (1 - p) / runs) + rare
    if width == 2:  # trees are told apart, not only their tokens
        assert len(counts) > 20


def test_perturbed_values_stay_finite_and_their_largest_is_the_bound():
    """Log-probabilities of -90 in float32, where the plain formula overflows."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.tensor([[-85.1, -175.0, -87.5, -torch.inf], [-95.0, -90.0, -91.0, -120.0]])
    gumbels = -torch.empty(2, 4).exponential_(generator=generator).log()
    bounds = torch.tensor([-85.0, -88.0])
    found = perturb(log_probs + gumbels, bounds)
    assert torch.equal(found.max(dim=-1).values, bounds)
    assert torch.isfinite(found[torch.isfinite(log_probs)]).all()
    assert found[0, 3] == -torch.inf
    order = (log_probs + gumbels).argsort(dim=-1)
    assert torch.equal(found.argsort(dim=-1), order)


def test_perturbed_values_equal_the_plain_formula_where_that_is_finite():
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.randn(3, 5, generator=generator).double().log_softmax(-1)
    keys = torch.randn(3, 5, generator=generator).double()
    bounds = torch.tensor([0.0, -1.5, 2.0]).double()
    largest = (log_probs + keys).max(-1, keepdim=True).values
    plain = -torch.log(
        torch.exp(-bounds[:, None]) - torch.exp(-largest) + torch.exp(-(log_probs + keys))
    )
    torch.testing.assert_close(perturb(log_probs + keys, bounds), plain, rtol=0, atol=1e-12)


def test_a_beam_goes_on_below_any_parents_in_falling_order():
    table, sampling, chance = LogitsTable(4, 4), Sampling(1.0), sampled(3)
    growth = Beam(3).plant(sampling, chance, ())
    proposal = grow(growth, table, 4)
    assert Counter(map(len, paths_of(proposal))) == {1: 3, 2: 3, 3: 3, 4: 3}
    assert proposal.draft_probs.shape == (1 + 3 * 3, 4)
    for node, row in enumerate(proposal.rows.tolist()):
        above = paths_of(proposal)[node][:-1]
        expected = warp(table[(*START, *above)], sampling)
        assert torch.equal(proposal.draft_probs[row], expected)


# --- chosen trees --------------------------------------------------------------------------------


def all_products(table: LogitsTable, depth: int, vocabulary: int) -> dict[Path, float]:
    products: dict[Path, float] = {(): 1.0}
    for length in range(1, depth + 1):
        for path in itertools.product(range(vocabulary), repeat=length):
            row = table[(*START, *path[:-1])].softmax(-1)
            products[path] = products[path[:-1]] * float(row[path[-1]])
    del products[()]
    return products


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 60])
@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_tree_holds_the_largest_products_of_all(seed, nodes):
    table = LogitsTable(seed, 4)
    growth = Optimal(nodes).plant(Sampling(1.0), sampled(), ())
    proposal = grow(growth, table, 3)
    products = all_products(table, 3, 4)
    best = sorted(products.values(), reverse=True)[:nodes]
    found = sorted((products[path] for path in paths_of(proposal)), reverse=True)
    assert found == pytest.approx(best, abs=1e-12)
    assert proposal.expected == pytest.approx(sum(best), abs=1e-6)
    for level, expected in enumerate(growth.expected, start=1):
        so_far = [p for path, p in products.items() if len(path) <= level]
        assert expected == pytest.approx(sum(sorted(so_far, reverse=True)[:nodes]), abs=1e-6)


def test_a_greedy_target_is_scored_as_if_the_drafter_were_surer():
    table, sharper = LogitsTable(3, 4), Sampling(GREEDY_SCORES)
    greedy = grow(Optimal(7).plant(Sampling(), sampled(), ()), table, 3)
    sharp = grow(Optimal(7).plant(sharper, sampled(), ()), table, 3)
    assert paths_of(greedy) == paths_of(sharp) and greedy.expected == sharp.expected
    plain = grow(Optimal(7).plant(Sampling(1.0), sampled(), ()), table, 3)
    assert greedy.expected > plain.expected and greedy.depth >= plain.depth


def test_a_node_whose_children_cannot_enter_is_not_fed():
    """One node: the best first token; below it nothing can score more."""
    growth = Optimal(1).plant(Sampling(), sampled(), ())
    assert growth.grow(LogitsTable(3, 4)[START][None], torch.zeros(1, 1)) == []


def test_a_child_that_ties_its_parent_comes_after_it():
    """Rows that are sure: every product is 1, as many as there are levels."""
    sure = SureTable()
    proposal = grow(Optimal(5).plant(Sampling(), sampled(), ()), sure, 3)
    assert proposal.tokens.tolist() == [2, 2, 2]
    assert proposal.parents.tolist() == [-1, 0, 1]
    assert proposal.expected == pytest.approx(3.0)


class SureTable:
    def __getitem__(self, path: Path) -> Tensor:
        return torch.tensor([-torch.inf, -torch.inf, 0.0])


def test_nothing_is_drafted_below_the_end_of_a_sequence():
    table = LogitsTable(2, 3)
    for shape in (Optimal(20), Paths(6), Branching((3, 3)), Beam(6), binary_tree(14)):
        found = paths_of(grow(shape.plant(Sampling(1.0), sampled(), {1}), table, 3))
        assert any(path[-1] == 1 for path in found)
        assert not any(1 in path[:-1] for path in found), shape.name


def test_a_judge_ranks_nodes_by_the_part_the_target_is_predicted_to_share():
    """q P: the first choice is judged hopeless, so that the second leads the tree."""
    table = LogitsTable(5, 3)
    first, second = table[START].argsort(descending=True)[:2].tolist()

    def judge(states: Tensor, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        assert len(states) == len(logits) == 1 and rows.tolist() == [0] * len(tokens)
        return torch.where(tokens == first, 1e-3, 1.0)

    growth = Optimal(2, judge).plant(Sampling(1.0), sampled(), ())
    proposal = grow(growth, table, 1)
    assert proposal.tokens.tolist()[0] == second
    probs = table[START].softmax(-1)
    assert first not in proposal.tokens.tolist() or probs[first] * 1e-3 > probs.min()


def test_fixed_trees_have_the_nodes_they_are_made_of():
    assert len(eagle_tree().paths) == 25 and eagle_tree().name == "eagle(25)"
    assert Counter(map(len, eagle_tree().paths)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    assert Counter(map(len, binary_tree(25).paths)) == {1: 2, 2: 4, 3: 8, 4: 11}
    table = LogitsTable(6, 4)
    proposal = grow(binary_tree(6).plant(Sampling(), sampled(), ()), table, 2)
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


WRONG: dict[str, Callable] = {
    "paths = 0": lambda: Paths(0),
    "branching = 0": lambda: Branching((2, 0)),
    "branching = 0 ": lambda: Branching(()),
    "width = 0": lambda: Beam(0),
    "nodes = 0": lambda: Optimal(0),
    r"path \(0, 1\)": lambda: Fixed(frozenset({(0, 1)})),
    "by_rank = ": lambda: best_fixed_tree((0.9, 0.3), 3, 2),
    "depth = 0": lambda: best_fixed_tree((0.5,), 3, 0),
}


@pytest.mark.parametrize("message", WRONG)
def test_impossible_trees_are_refused(message):
    with pytest.raises(ValueError, match=message.strip()):
        WRONG[message]()
