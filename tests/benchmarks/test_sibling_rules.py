"""Acceptance of verifiers for siblings, compared with enumeration and computed by hand."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.sibling_rules import acceptance, bernoulli
from drafttrain.decoding.roles import Randomness, Verifier
from drafttrain.decoding.trees.verifiers import KSeq, MultiRound, RecursiveRejection
from drafttrain.decoding.types import Proposal, Sampling
from tests.decoding.enumeration import enumerate_law

TARGET, DRAFT = (0.5, 0.15, 0.35), (0.2, 0.7, 0.1)
APART = ((0.6, 0.4, 0.0), (0.0, 0.45, 0.55))
"""Target and draft probabilities of which neither support contains the other."""


def row(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def enumerated(verifier: Verifier, target: Tensor, draft: Tensor, siblings: int) -> float:
    """Enumerates drawing siblings as a drafter does (equal ones merged) and verifying the tree."""

    def accepted(randomness: Randomness) -> bool:
        left, drawn = draft.clone(), []
        distinct = verifier is RecursiveRejection
        for _ in range(min(siblings, int((draft > 0).sum())) if distinct else siblings):
            drawn.append(int(randomness.categorical((left / left.sum())[None])))
            if distinct:
                left[drawn[-1]] = 0.0
        counts = Counter(drawn)
        proposal = Proposal(
            tokens=torch.tensor(list(counts)),
            parents=torch.full((len(counts),), -1),
            draw_kind="without_replacement" if distinct else "iid",
            draft_probs=draft[None],
            rows=torch.zeros(len(counts), dtype=torch.long),
            counts=torch.tensor(list(counts.values())),
        )
        logits = target.log().expand(len(counts) + 1, -1)
        return len(verifier.verify(proposal, logits, Sampling(1.0), randomness).path) > 0

    return enumerate_law(accepted).get(True, 0.0)


@pytest.mark.parametrize("rows", [(TARGET, DRAFT), APART], ids=["full", "supports apart"])
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_acceptance_is_that_of_verification_with_every_outcome_visited(rows, siblings):
    target, draft = row(*rows[0]), row(*rows[1])
    found = acceptance(draft.tolist(), target.tolist(), siblings)
    for verifier, computed in (
        (MultiRound, found.multi_round),
        (KSeq, found.k_seq),
        (RecursiveRejection, found.recursive),
    ):
        assert computed == pytest.approx(
            enumerated(verifier, target, draft, siblings), abs=1e-12
        ), verifier.name


POINTS = [(0.5, 0.3), (0.5, 0.1), (0.3, 0.7), (0.9, 0.1), (0.99, 0.01), (0.4, 0.4), (0.25, 0.75)]


@pytest.mark.parametrize(("p", "q"), POINTS)
def test_two_siblings_of_a_bernoulli_pair_by_hand(p, q):
    """Assume p > q, else swap the tokens. Multi-round: the first token is 1 and is rejected with
    probability p - q; the residual target is then all on 0, and the second token is 1 with p.
    Optimum: (1, 1) is drawn with p^2, of which q can be accepted. K-SEQ: beta = q / gamma + 1 - p,
    and 1 - (1 - beta)^2 = gamma beta gives 2 - beta = gamma."""
    found = bernoulli(p, q, 2)
    if p < q:
        p, q = 1.0 - p, 1.0 - q
    gamma = (1.0 + p + math.sqrt((1.0 + p) ** 2 - 4.0 * q)) / 2.0
    assert found.single == pytest.approx(1.0 - (p - q), abs=1e-12)
    assert found.multi_round == pytest.approx(1.0 - p * (p - q), abs=1e-12)
    assert found.k_seq == pytest.approx(gamma * (2.0 - gamma), abs=1e-12)
    assert found.optimum == pytest.approx(1.0 - max(0.0, p * p - q), abs=1e-12)
    assert found.recursive == 1.0


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draws target and draft probabilities of 2 to 4 tokens, some of them zero."""
    size = draw(st.integers(2, 4))
    weights = st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)
    target, draft = (torch.tensor(draw(weights), dtype=torch.float64) for _ in range(2))
    return target / target.sum(), draft / draft.sum()


@settings(max_examples=25, deadline=None)
@given(rows(), st.integers(1, 3))
def test_no_rule_for_independent_siblings_beats_the_optimum(pair, siblings):
    target, draft = pair
    found = acceptance(draft.tolist(), target.tolist(), siblings)
    assert max(found.multi_round, found.k_seq) <= found.optimum + 1e-12
    for value in vars(found).values():
        assert found.single - 1e-12 <= value <= 1.0 + 1e-12
