"""Tree verifiers: enumerates every random outcome of drawing a tree and verifying it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.roles import Randomness, Verifier
from drafttrain.decoding.trees import verifiers as tree_verifiers
from drafttrain.decoding.trees.drawn import Branching, Paths
from drafttrain.decoding.trees.fixed import Fixed
from drafttrain.decoding.trees.shapes import Shape
from drafttrain.decoding.trees.verifiers import (
    KSeq,
    MultiRound,
    RecursiveRejection,
    TargetWalk,
    Traversal,
    k_seq_gamma,
    rejected_child,
)
from drafttrain.decoding.types import Proposal, Sampling
from drafttrain.decoding.verifiers import BlockVerification, RejectionSampling
from tests.decoding.enumeration import enumerate_law, total_variation
from tests.decoding.expected import expected_probs
from tests.decoding.paths import paths_of, tokens_to
from tests.decoding.toys import LogitsTable
from tests.decoding.trees.growing import START, grow, proposal_of

SAMPLINGS = {
    "temperature 1": Sampling(1.0),
    "top-k": Sampling(1.3, top_k=2),
    "top-p": Sampling(1.5, top_p=0.8),
}
Grow = Callable[[LogitsTable, Sampling, Randomness], Proposal]


def drawn(shape: Shape, depth: int = 2) -> Grow:
    """Draws trees of a shape with this number of levels."""
    return lambda table, sampling, randomness: grow(
        shape.new_tree(sampling, randomness, ()), table, depth
    )


def likeliest(width: int) -> Grow:
    """Takes the most likely tokens of each row of two levels."""
    ranks = (itertools.product(range(width), repeat=length) for length in (1, 2))
    return drawn(Fixed(frozenset(itertools.chain(*ranks))))


def target_logits(table: LogitsTable, proposal: Proposal) -> Tensor:
    return torch.stack([table[(*START, *path)] for path in [(), *paths_of(proposal)]])


def law_of_two(verifier, draw: Grow, target, draft, sampling: Sampling) -> Tensor:
    """Returns the joint distribution [V, V] of the first two tokens: one round, completed by plain
    sampling."""
    vocabulary = len(target[START])

    def play(randomness: Randomness) -> tuple[int, ...]:
        proposal = draw(draft, sampling, randomness)
        verdict = verifier.verify(proposal, target_logits(target, proposal), sampling, randomness)
        return (*proposal.tokens[verdict.path].tolist(), verdict.next_token)

    law = torch.zeros(vocabulary, vocabulary, dtype=torch.float64)
    for tokens, probability in enumerate_law(play).items():
        if len(tokens) == 1:
            law[tokens[0]] += probability * expected_probs(target[(*START, *tokens)], sampling)
        else:
            law[tokens[:2]] += probability
    return law


def plain_law(target: LogitsTable, sampling: Sampling) -> Tensor:
    first = expected_probs(target[START], sampling)
    return torch.stack(
        [p * expected_probs(target[(*START, token)], sampling) for token, p in enumerate(first)]
    )


LOSSLESS = {
    "multi-round": (MultiRound, drawn(Paths(2))),
    "multi-round of three": (MultiRound, drawn(Paths(3), 1)),
    "k-seq": (KSeq, drawn(Paths(2))),
    "k-seq of three": (KSeq, drawn(Paths(3), 1)),
    "recursive": (RecursiveRejection, drawn(Branching((2, 2)))),
    "traversal iid": (Traversal, drawn(Paths(2))),
    "traversal of three": (Traversal, drawn(Paths(3), 1)),
    "traversal": (Traversal, drawn(Branching((2, 2)))),
    "traversal of pairs below one": (Traversal, drawn(Branching((1, 3)))),
    "walk iid": (TargetWalk, drawn(Paths(2))),
    "walk without replacement": (TargetWalk, drawn(Branching((2, 2)))),
    "walk deterministic": (TargetWalk, likeliest(2)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("excluded", [0.0, 0.4], ids=["full", "supports apart"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_the_output_is_the_targets_own(name: str, excluded: float, sampling: Sampling) -> None:
    verifier, draw = LOSSLESS[name]
    target, draft = LogitsTable(1, 3, excluded), LogitsTable(2, 3, excluded)
    law = law_of_two(verifier, draw, target, draft, sampling)
    assert (law - plain_law(target, sampling)).abs().max() < 1e-12


@pytest.mark.parametrize("rule", [MultiRound, KSeq, RecursiveRejection], ids=lambda r: r.name)
def test_on_a_chain_every_rule_is_speculative_sampling(rule: Verifier) -> None:
    target, draft, sampling = LogitsTable(5, 3), LogitsTable(6, 3), SAMPLINGS["temperature 1"]
    law = law_of_two(rule, drawn(Paths(1)), target, draft, sampling)
    chain = law_of_two(RejectionSampling(), drawn(Paths(1)), target, draft, sampling)
    torch.testing.assert_close(law, chain, rtol=0, atol=1e-12)
    accepted = [
        enumerate_law(
            lambda randomness, verifier=verifier: play_length(
                verifier, target, draft, sampling, randomness
            )
        )
        for verifier in (rule, RejectionSampling())
    ]
    assert accepted[0] == pytest.approx(accepted[1], abs=1e-12)


def test_on_a_chain_traversal_is_block_verification() -> None:
    target, draft, sampling = LogitsTable(5, 3), LogitsTable(6, 3), SAMPLINGS["temperature 1"]

    def law_of(verifier: Verifier) -> dict:
        def play(randomness: Randomness) -> tuple:
            proposal = drawn(Paths(1), 3)(draft, sampling, randomness)
            logits = target_logits(target, proposal)
            verdict = verifier.verify(proposal, logits, sampling, randomness)
            return (tuple(proposal.tokens.tolist()), len(verdict.path), verdict.next_token)

        return enumerate_law(play)

    assert total_variation(law_of(Traversal), law_of(BlockVerification())) < 1e-12
    assert total_variation(law_of(Traversal), law_of(RecursiveRejection)) > 0.01


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("draw", "rule"),
    [(drawn(Branching((2, 2))), RecursiveRejection), (drawn(Paths(2)), MultiRound)],
    ids=["without replacement", "independent"],
)
def test_traversal_accepts_more_than_going_down(draw: Grow, rule: Verifier, seed: int) -> None:
    target, draft, sampling = LogitsTable(seed, 3), LogitsTable(20 + seed, 3), Sampling(1.0)

    def mean_length(verifier: Verifier) -> float:
        def play(randomness: Randomness) -> int:
            proposal = draw(draft, sampling, randomness)
            logits = target_logits(target, proposal)
            return len(verifier.verify(proposal, logits, sampling, randomness).path)

        return sum(length * p for length, p in enumerate_law(play).items())

    assert mean_length(Traversal) >= mean_length(rule)


def keeps_its_weight(target: Tensor, draft: Tensor, weight: float) -> tuple[Tensor, float]:
    """Wrong on purpose: the node's weight is unchanged after a child was rejected."""
    return rejected_child(target, draft, weight)[0], weight


def forgets_the_weight(target: Tensor, draft: Tensor, weight: float) -> tuple[Tensor, float]:
    """Wrong on purpose: the residual of token-by-token rejection."""
    return rejected_child(target, draft, 1.0)[0], rejected_child(target, draft, weight)[1]


@pytest.mark.parametrize("wrong", [keeps_its_weight, forgets_the_weight], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["traversal", "traversal iid"])
def test_control_a_wrong_traversal_is_detected(name, wrong, monkeypatch) -> None:
    verifier, draw = LOSSLESS[name]
    target, draft, sampling = LogitsTable(1, 3), LogitsTable(2, 3), Sampling(1.0)
    monkeypatch.setattr(tree_verifiers, "rejected_child", wrong)
    law = law_of_two(verifier, draw, target, draft, sampling)
    assert 0.5 * (law - plain_law(target, sampling)).abs().sum() > 1e-3


def test_control_a_traversal_that_draws_rejected_siblings_again_is_detected(monkeypatch) -> None:
    target, draft, sampling = LogitsTable(1, 3), LogitsTable(2, 3), Sampling(1.0)
    monkeypatch.setattr(tree_verifiers, "without", lambda drafts, token: drafts)
    law = law_of_two(Traversal, drawn(Branching((2, 2))), target, draft, sampling)
    assert 0.5 * (law - plain_law(target, sampling)).abs().sum() > 1e-3


def test_traversal_of_siblings_by_hand() -> None:
    """Target (.5, .3, .2), draft (.1, .6, .3), after a sibling was rejected with weight 0.8."""
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.6, 0.3])
    row, weight = rejected_child(target, draft, 0.8)
    assert row.tolist() == pytest.approx([1.0, 0.0, 0.0])  # (.4 - .1)+, (.24 - .6)+, (.16 - .3)+
    assert weight == pytest.approx(0.3 / (0.3 + 0.2))
    assert rejected_child(draft, draft, 1.0)[1] == 1.0


def play_length(verifier, target, draft, sampling: Sampling, randomness: Randomness) -> int:
    proposal = drawn(Paths(1))(draft, sampling, randomness)
    verdict = verifier.verify(proposal, target_logits(target, proposal), sampling, randomness)
    return len(verdict.path)


WRONG = {
    "deterministic as independent": (MultiRound, likeliest(2)),
    "without replacement as independent": (MultiRound, drawn(Branching((2, 1)))),
    "deterministic, from the leaves up": (Traversal, likeliest(2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_verifier_refuses_draws_for_which_it_is_biased(name: str) -> None:
    """Control: pairs that the check refuses would indeed be biased."""
    verifier, draw = WRONG[name]
    target, draft, sampling = LogitsTable(1, 3), LogitsTable(2, 3), SAMPLINGS["temperature 1"]

    def with_rows(table: LogitsTable, sampling: Sampling, randomness: Randomness) -> Proposal:
        found = draw(table, sampling, randomness)
        if found.draft_probs is not None:
            return found
        return proposal_of(paths_of(found), table, sampling, "iid")

    law = law_of_two(verifier, with_rows, target, draft, sampling)
    assert 0.5 * (law - plain_law(target, sampling)).abs().sum() > 0.01


def test_gamma_of_k_seq_by_hand() -> None:
    """Target (1, 0), draft (1/2, 1/2), two draws: beta = min(1/2, 1/gamma) = 1/2 for gamma <= 2,
    and 1 - 1/4 = gamma / 2 at gamma = 3/2. Equal rows and a single draw give gamma 1."""
    target, draft = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.5, 0.5]).double()
    assert k_seq_gamma(target, draft, 2) == pytest.approx(1.5, abs=1e-12)
    assert k_seq_gamma(target, draft, 1) == 1.0
    assert k_seq_gamma(draft, draft, 3) == pytest.approx(1.0, abs=1e-12)


def test_a_greedy_target_is_walked_down_its_arg_maxes() -> None:
    target, draft = LogitsTable(3, 3), LogitsTable(4, 3)
    proposal = likeliest(3)(draft, Sampling(), ArgMax())
    verdict = TargetWalk.verify(proposal, target_logits(target, proposal), Sampling(), ArgMax())
    first = int(target[START].argmax())
    second = int(target[(*START, first)].argmax())
    assert tokens_to(proposal, int(verdict.path[-1])) == (first, second)
    assert verdict.next_token == int(target[(*START, first, second)].argmax())


class ArgMax:
    """A `Randomness` that makes no random choices."""

    def categorical(self, probs: Tensor) -> Tensor:
        return probs.argmax(dim=-1)

    def accept_run(self, probs: Tensor) -> int:
        return int((probs > 0.5).cumprod(0).sum())
