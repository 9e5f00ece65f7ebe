"""Tree verifiers: enumerates every random outcome of drawing a tree and verifying it."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.roles import Randomness, Verifier
from drafttrain.decoding.trees.drawn import Branching, Paths
from drafttrain.decoding.trees.fixed import Fixed
from drafttrain.decoding.trees.shapes import Shape
from drafttrain.decoding.trees.verifiers import (
    KSeq,
    MultiRound,
    RecursiveRejection,
    TargetWalk,
    k_seq_gamma,
)
from drafttrain.decoding.types import Proposal, Sampling
from drafttrain.decoding.verifiers import RejectionSampling
from tests.decoding.enumeration import enumerate_law
from tests.decoding.paths import tokens_to
from tests.decoding.toys import LogitsTable
from tests.decoding.trees.growing import START, grown, probs_after, rows_along

SAMPLINGS = {
    "temperature 1": Sampling(1.0),
    "top-k": Sampling(1.3, top_k=2),
    "top-p": Sampling(1.5, top_p=0.8),
}
Grow = Callable[[LogitsTable, Sampling, Randomness], Proposal]


def drawn(shape: Shape, depth: int = 2) -> Grow:
    """Draws trees of a shape with this number of levels."""
    return lambda table, sampling, randomness: grown(shape, table, sampling, depth, randomness)


def likeliest(width: int) -> Grow:
    """Takes the most likely tokens of each row of two levels."""
    ranks = (itertools.product(range(width), repeat=length) for length in (1, 2))
    return drawn(Fixed(frozenset(itertools.chain(*ranks))))


def law_of_two(verifier, draw: Grow, target, draft, sampling: Sampling) -> Tensor:
    """Returns the joint distribution [V, V] of the first two tokens: one round, completed by plain
    sampling."""
    vocabulary = len(target[START])

    def play(randomness: Randomness) -> tuple[int, ...]:
        proposal = draw(draft, sampling, randomness)
        verdict = verifier.verify(proposal, rows_along(target, proposal), sampling, randomness)
        return (*proposal.tokens[verdict.path].tolist(), verdict.next_token)

    law = torch.zeros(vocabulary, vocabulary, dtype=torch.float64)
    for tokens, probability in enumerate_law(play).items():
        if len(tokens) == 1:
            law[tokens[0]] += probability * probs_after(target, tokens, sampling)
        else:
            law[tokens[:2]] += probability
    return law


def plain_law(target: LogitsTable, sampling: Sampling) -> Tensor:
    first = probs_after(target, (), sampling)
    return torch.stack([p * probs_after(target, (n,), sampling) for n, p in enumerate(first)])


LOSSLESS = {
    "multi-round": (MultiRound, drawn(Paths(2))),
    "multi-round of three": (MultiRound, drawn(Paths(3), 1)),
    "k-seq": (KSeq, drawn(Paths(2))),
    "k-seq of three": (KSeq, drawn(Paths(3), 1)),
    "recursive": (RecursiveRejection, drawn(Branching((2, 2)))),
    "walk iid": (TargetWalk, drawn(Paths(2))),
    "walk without replacement": (TargetWalk, drawn(Branching((2, 2)))),
    "walk deterministic": (TargetWalk, likeliest(2)),
}


@pytest.mark.covered
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("excluded", [0.0, 0.4], ids=["full", "supports apart"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_the_output_is_the_targets_own(name, excluded, sampling):
    verifier, draw = LOSSLESS[name]
    target, draft = LogitsTable(1, 3, excluded), LogitsTable(2, 3, excluded)
    law = law_of_two(verifier, draw, target, draft, sampling)
    assert (law - plain_law(target, sampling)).abs().max() < 1e-12


@pytest.mark.parametrize("rule", [MultiRound, KSeq, RecursiveRejection], ids=lambda r: r.name)
def test_on_a_chain_every_rule_accepts_as_often_as_speculative_sampling(rule):
    target, draft, sampling = LogitsTable(5, 3), LogitsTable(6, 3), SAMPLINGS["temperature 1"]

    def accepted(verifier: Verifier) -> dict[int, float]:
        def play(randomness: Randomness) -> int:
            proposal = drawn(Paths(1))(draft, sampling, randomness)
            logits = rows_along(target, proposal)
            return len(verifier.verify(proposal, logits, sampling, randomness).path)

        return enumerate_law(play)

    assert accepted(rule) == pytest.approx(accepted(RejectionSampling()), abs=1e-12)


def test_gamma_of_k_seq_by_hand():
    """Target (1, 0), draft (1/2, 1/2), two draws: beta = min(1/2, 1/gamma) = 1/2 for gamma <= 2,
    and 1 - 1/4 = gamma / 2 at gamma = 3/2. Equal rows and a single draw give gamma 1."""
    target, draft = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.5, 0.5]).double()
    assert k_seq_gamma(target, draft, 2) == pytest.approx(1.5, abs=1e-12)
    assert k_seq_gamma(target, draft, 1) == 1.0
    assert k_seq_gamma(draft, draft, 3) == pytest.approx(1.0, abs=1e-12)


def test_a_greedy_target_is_walked_down_its_arg_maxes():
    target, draft = LogitsTable(3, 3), LogitsTable(4, 3)
    proposal = likeliest(3)(draft, Sampling(), ArgMax())
    verdict = TargetWalk.verify(proposal, rows_along(target, proposal), Sampling(), ArgMax())
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
