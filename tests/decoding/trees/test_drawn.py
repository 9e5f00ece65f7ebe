"""Sampled trees: their nodes, the order of nodes, and the probability of each tree."""

from collections import Counter
from functools import cache

import pytest
import torch

from drafttrain.decoding.roles import Randomness, Verifier
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.trees.drawn import Beam, Branching, Paths, perturb
from drafttrain.decoding.trees.verifiers import RecursiveRejection, TargetWalk
from drafttrain.decoding.types import Proposal, Sampling
from tests.comparing import close
from tests.decoding.decoded import drawn as sampled
from tests.decoding.enumeration import EnumeratedRandomness, enumerate_law
from tests.decoding.expected import chi_square
from tests.decoding.paths import Path, paths_of
from tests.decoding.toys import LogitsTable
from tests.decoding.trees.growing import grown, probs_after, proposal_of, rows_along


def test_equal_beginnings_of_paths_are_one_node_with_a_count():
    table, sampling = LogitsTable(1, 2), Sampling(1.0)
    proposal = grown(Paths(5), table, sampling)
    paths, counts = paths_of(proposal), proposal.counts.tolist()
    assert len(set(paths)) == len(paths)
    known = dict(zip(paths, counts, strict=True))
    for depth in (1, 2, 3):
        assert sum(c for path, c in known.items() if len(path) == depth) == 5
    for path, count in known.items():
        below = sum(c for p, c in known.items() if p[:-1] == path)
        assert below == (count if len(path) < 3 else 0)


@pytest.mark.parametrize(
    "randomness", [sampled(), EnumeratedRandomness()], ids=["drawn", "enumerated"]
)
def test_a_row_with_fewer_tokens_than_siblings_gives_those_it_has(randomness):
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    drawn = randomness.without_replacement(probs, 3).tolist()
    assert drawn[0] == [1, -1, -1]
    assert sorted(drawn[1][:2]) == [0, 2] and drawn[1][2] == -1
    proposal = grown(Branching((3, 3)), LogitsTable(3, 3), Sampling(1.0, top_k=2), 2)
    assert len(proposal.tokens) == 2 + 2 * 2


def test_levels_have_their_own_widths():
    proposal = grown(Branching((3, 2, 1)), LogitsTable(3, 5), Sampling(1.0))
    assert Counter(map(len, paths_of(proposal))) == {1: 3, 2: 6, 3: 6}
    assert Branching((3, 2, 1)).name == "rsd-c(3,2,1)"


Levels = tuple[tuple[Path, ...], ...]
"""The paths of each level of a beam, in the order drawn."""


@cache
def beam_trees(
    table: LogitsTable, sampling: Sampling, width: int, end: int | None = None, depth: int = 2
) -> dict[Levels, float]:
    """Returns the distribution of RSD-S trees from the Plackett-Luce order of all leaf sequences.

    The perturbed log-probability of a prefix is the maximum over its leaves, so each level has the
    first `width` different prefixes in that order whose parents are in the level above. Leaves that
    can add no node are skipped. A token that ends a sequence is a leaf.
    """
    leaves: dict[Path, float] = {(): 1.0}
    for _ in range(depth):
        grown: dict[Path, float] = {}
        for path, p in leaves.items():
            if path[-1:] == (end,):
                grown[path] = p
                continue
            row = probs_after(table, path, sampling).tolist()
            grown |= {(*path, token): p * own for token, own in enumerate(row)}
        leaves = {path: p for path, p in grown.items() if p > 0.0}
    law: dict[Levels, float] = {}

    def added(leaf: Path, levels: Levels) -> Levels | None:
        """Returns the levels with the prefixes that a leaf adds; None if it adds none."""
        more = list(levels)
        for place in range(len(leaf)):
            prefix = leaf[: place + 1]
            if prefix not in more[place]:
                if len(more[place]) == width:
                    break
                more[place] = (*more[place], prefix)
        return None if tuple(more) == levels else tuple(more)

    def go(levels: Levels, probability: float) -> None:
        adding = {leaf: more for leaf in leaves if (more := added(leaf, levels)) is not None}
        if not adding:
            law[levels] = law.get(levels, 0.0) + probability
            return
        total = sum(leaves[leaf] for leaf in adding)
        for leaf, more in adding.items():
            go(more, probability * leaves[leaf] / total)

    go(((),) * depth, 1.0)
    return law


def beam_bias(
    trees: dict[Levels, float],
    target: LogitsTable,
    draft: LogitsTable,
    sampling: Sampling,
    verifier: Verifier,
) -> float:
    """Returns the distance between the distribution of the first tokens, over all trees and
    outcomes, and the target's."""
    depth, vocabulary = len(next(iter(trees))), len(target[(0,)])
    law = torch.zeros((vocabulary,) * depth, dtype=torch.float64)

    def go_on(tokens: Path, probability: float) -> None:
        """Samples plainly the tokens that the round did not emit."""
        if len(tokens) >= depth:
            law[tokens[:depth]] += probability
            return
        for token, p in enumerate(probs_after(target, tokens, sampling).tolist()):
            go_on((*tokens, token), probability * p)

    for levels, likely in trees.items():
        nodes = [path for level in levels for path in level]
        proposal = proposal_of(nodes, draft, sampling, "without_replacement")
        rows = rows_along(target, proposal)

        def play(randomness: Randomness, proposal=proposal, rows=rows) -> Path:
            verdict = verifier.verify(proposal, rows, sampling, randomness)
            return (*proposal.tokens[verdict.path].tolist(), verdict.next_token)

        for tokens, probability in enumerate_law(play).items():
            go_on(tokens, likely * probability)
    found, law = law, torch.zeros_like(law)
    go_on((), 1.0)
    return float((found - law).abs().max())


PAIRS = {part: (LogitsTable(1, 3, part), LogitsTable(2, 3, part)) for part in (0.0, 0.4)}
"""Target and draft by the share of tokens that each excludes."""


@pytest.mark.covered
@pytest.mark.parametrize("end", [None, 1], ids=["endless", "a token ends"])
@pytest.mark.parametrize(
    "verifier", [RecursiveRejection, TargetWalk], ids=lambda verifier: verifier.name
)
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize(
    ("sampling", "excluded"),
    [(Sampling(1.0), 0.0), (Sampling(1.3, top_k=2), 0.0), (Sampling(1.5, top_p=0.8), 0.4)],
    ids=["temperature 1", "top-k", "top-p, supports apart"],
)
def test_stochastic_beams_are_exact(width, sampling, excluded, verifier, end):
    target, draft = PAIRS[excluded]
    trees = beam_trees(draft, sampling, width, end)
    assert sum(trees.values()) == pytest.approx(1.0, abs=1e-12)
    if width == 3 and sampling == Sampling(1.0) and end is None:
        assert len(trees) == 522
    assert beam_bias(trees, target, draft, sampling, verifier) < 1e-12


@pytest.mark.parametrize("width", [2, 3])
def test_beams_of_three_levels_are_exact(width):
    """Whether a node exists depends on the descendants of its siblings."""
    target, draft, sampling = LogitsTable(1, 2), LogitsTable(2, 2), Sampling(1.0)
    trees = beam_trees(draft, sampling, width, depth=3)
    assert len(trees) == {2: 72, 3: 480}[width]
    assert beam_bias(trees, target, draft, sampling, RecursiveRejection) < 1e-12


def levels_of(proposal: Proposal) -> Levels:
    found = paths_of(proposal)
    return tuple(tuple(path for path in found if len(path) == level) for level in (1, 2))


@pytest.mark.end_to_end  # thousands of sequences
@pytest.mark.parametrize(
    ("shape", "end"),
    [(Branching((2, 2)), 1), (Beam(2), 1), (Beam(3), None)],
    ids=str,
)
def test_sequences_with_streams_of_their_own_have_independent_trees(shape, end):
    """The production random source; with a shared stream all sequences would have the same tree."""
    (target, draft), sampling = PAIRS[0.0], Sampling(1.0)

    def tree(randomness: Randomness) -> Proposal:
        return grown(shape, draft, sampling, 2, randomness, {end})

    trees: Counter[Levels] = Counter()
    firsts: Counter[int] = Counter()
    for row in range(4000):
        randomness = sequence_randomness(5, row)
        proposal = tree(randomness)
        trees[levels_of(proposal)] += 1
        rows = rows_along(target, proposal)
        verdict = RecursiveRejection.verify(proposal, rows, sampling, randomness)
        firsts[[*proposal.tokens[verdict.path].tolist(), verdict.next_token][0]] += 1
    if isinstance(shape, Beam):
        law = beam_trees(draft, sampling, shape.width, end)
    else:
        law = enumerate_law(lambda randomness: levels_of(tree(randomness)))
    assert chi_square(trees, law) > 1e-3
    expected = probs_after(target, (), sampling).tolist()
    assert chi_square(firsts, dict(enumerate(expected))) > 1e-3


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


def test_a_beam_goes_on_below_any_parents_in_falling_order():
    table, sampling = LogitsTable(4, 4), Sampling(1.0)
    proposal = grown(Beam(3), table, sampling, 4)
    assert Counter(map(len, paths_of(proposal))) == {1: 3, 2: 3, 3: 3, 4: 3}
    assert proposal.draft_probs.shape == (1 + 3 * 3, 4)
    for node, row in enumerate(proposal.rows.tolist()):
        above = paths_of(proposal)[node][:-1]
        expected = probs_after(table, above, sampling)
        close(proposal.draft_probs[row], expected, 1e-12)
