"""Verifiers on hand-computed cases; test_exactness.py shows by enumeration which are lossless."""

import math

import pytest
import torch

from drafttrain.config.methods import STOPS
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.roles import Randomness, Verifier
from drafttrain.decoding.types import Proposal, Sampling
from drafttrain.decoding.verifiers import (
    BlockVerification,
    GreedyMatch,
    RejectionSampling,
    SpecVerification,
    acceptance_probability,
    block_rejection,
    check_pairing,
    prefix_weights,
    probability_ratio,
)
from tests.decoding.decoded import drawn
from tests.decoding.enumeration import EnumeratedRandomness, enumerate_law
from tests.decoding.expected import expected_probs
from tests.decoding.toys import LogitsTable

GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)

LOGITS = torch.tensor(
    [
        [4.0, 3.0, 2.0, 0.0],  # verifies draft token 0
        [0.0, 5.0, 4.5, 4.0],  # verifies draft token 1
        [1.0, 0.0, 3.0, 2.5],  # follows both
    ]
)


def verify(verifier: Verifier, tokens: list[int], logits=LOGITS) -> tuple[list[int], int]:
    """Returns the accepted path and the next token of a greedy target."""
    verdict = verifier.verify(Proposal.chain(torch.tensor(tokens)), logits, GREEDY, drawn())
    return verdict.path.tolist(), verdict.next_token


def test_greedy_match_replaces_the_first_mismatch_by_the_arg_max():
    assert verify(GreedyMatch(), [0, 1]) == ([0, 1], 2)  # bonus
    assert verify(GreedyMatch(), [0, 2]) == ([0], 1)  # correction
    assert verify(GreedyMatch(), [1, 1]) == ([], 0)  # later matches do not count


def test_spec_verification_needs_rank_and_gap():
    assert verify(SpecVerification(2, 1.0), [1, 2]) == ([0, 1], 2)
    assert verify(SpecVerification(1, 1.0), [1, 2]) == ([], 0)  # rank 2 > beta
    assert verify(SpecVerification(3, 0.9), [1, 2]) == ([], 0)  # gap 1.0 > tau
    assert verify(SpecVerification(3, 1.0), [0, 0]) == ([0], 1)


def test_a_gap_equal_to_tau_passes_and_the_next_float_does_not():
    exact, just_below = SpecVerification(4, 2.0), SpecVerification(4, math.nextafter(2.0, 0.0))
    assert verify(exact, [2, 1], LOGITS.double()) == ([0, 1], 2)
    assert verify(just_below, [2, 1], LOGITS.double()) == ([], 0)


def test_beta_one_is_greedy_match_but_for_exact_ties():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(4, 5, generator=generator)
        tokens = torch.where(
            torch.rand(3, generator=generator) < 0.7,
            logits[:3].argmax(-1),
            torch.randint(5, (3,), generator=generator),
        ).tolist()
        spec = verify(SpecVerification(1, 10.0), tokens, logits)
        assert spec == verify(GreedyMatch(), tokens, logits)
    tied = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert verify(SpecVerification(1, 0.0), [1], tied) == ([0], 2)
    assert verify(GreedyMatch(), [1], tied) == ([], 0)


def test_beta_beyond_the_vocabulary_is_clamped():
    assert verify(SpecVerification(100, 50.0), [3, 0]) == ([0, 1], 2)


def test_an_excluded_token_never_passes():
    logits = torch.tensor([[1.0, -torch.inf, 0.0], [0.0, 1.0, 0.0]])
    assert verify(SpecVerification(3, 1e9), [1], logits) == ([], 0)


class AlwaysRejects(EnumeratedRandomness):
    def accept_run(self, probs: torch.Tensor) -> int:
        return 0


def test_a_rejection_that_cannot_happen_gives_a_token_and_no_nan():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    probs = logits[:1].softmax(-1)
    proposal = Proposal.chain(torch.tensor([1]), probs)
    verdict = RejectionSampling().verify(proposal, logits, SAMPLED, AlwaysRejects())
    assert verdict.next_token in (0, 1)


def test_rows_name_the_draft_row_of_each_token():
    tokens = torch.tensor([1, 0])
    proposal = Proposal(tokens, torch.tensor([-1, 0]), "iid", torch.eye(2), rows=tokens)
    verify = RejectionSampling().verify
    logits = torch.zeros(3, 2, dtype=torch.float64)
    law = enumerate_law(lambda own: len(verify(proposal, logits, SAMPLED, own).path))
    assert law == {0: 0.5, 1: 0.25, 2: 0.25}


@pytest.mark.parametrize("excluded", [0.0, 0.4], ids=["full", "supports apart"])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_accept_each_prefix_with_its_weight_and_no_less_than_token_by_token(seed, excluded):
    target, draft = (LogitsTable(place + seed, 3, excluded) for place in (0, 500))

    def run(randomness: Randomness) -> tuple[tuple[int, ...], int]:
        tokens: tuple[int, ...] = ()
        for _ in range(3):
            tokens += (int(randomness.categorical(draft[tokens].softmax(-1)[None])),)
        heads = [tokens[:length] for length in range(4)]
        rows = torch.stack([draft[head] for head in heads[:-1]]).softmax(-1)
        logits = torch.stack([target[head] for head in heads])
        chain = Proposal.chain(torch.tensor(tokens), rows)
        return tokens, len(BlockVerification().verify(chain, logits, SAMPLED, randomness).path)

    law = enumerate_law(run)
    for tokens in {tokens for tokens, _ in law}:
        heads = [tokens[:length] for length in range(3)]
        rows = torch.stack([draft[head] for head in heads]).softmax(-1)
        probs = expected_probs(torch.stack([target[head] for head in heads]), SAMPLED)
        weights = prefix_weights(probs, rows, torch.tensor(tokens))
        by_token = acceptance_probability(probs, rows, torch.tensor(tokens)).cumprod(0).tolist()
        for length in (1, 2, 3):
            same = [(n, p) for (own, n), p in law.items() if own[:length] == tokens[:length]]
            accepted = sum(p for n, p in same if n >= length) / sum(p for _, p in same)
            assert accepted == pytest.approx(weights[length], abs=1e-12)
            assert weights[length] >= by_token[length - 1] - 1e-15


def test_zero_over_zero_is_1_and_has_no_effect():
    row = torch.tensor([0.25, 0.75], dtype=torch.float64)
    weights = prefix_weights(row.expand(2, 2), row.expand(2, 2), torch.tensor([1, 0]))
    assert weights == [1.0, 1.0, 1.0]
    assert block_rejection(weights, row.expand(3, 2), row.expand(2, 2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("verifier", "mean"), [(RejectionSampling(), 10 / 9), (BlockVerification(), 11 / 9)]
)
def test_a_later_token_makes_up_for_an_earlier_one_in_blocks(verifier, mean):
    """Sun et al. 2024, Section 2: B has target probability 1/3 and draft probability 2/3."""
    target, draft = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64) / 3.0
    logits, rows = target.log().expand(3, 2), draft.expand(2, 2)

    def run(randomness: Randomness) -> int:
        proposal = Proposal.chain(randomness.categorical(rows), rows)
        return len(verifier.verify(proposal, logits, SAMPLED, randomness).path)

    assert sum(n * p for n, p in enumerate_law(run).items()) == pytest.approx(mean)


@pytest.mark.parametrize("verifier", [RejectionSampling(), BlockVerification()])
def test_rows_in_float32_emit_only_tokens_of_the_targets_support(verifier):
    """With the production random source and large logits; supports are often apart."""
    randomness, generator = drawn(), torch.Generator().manual_seed(0)
    for _ in range(300):
        logits, rows = 6.0 * torch.randn(2, 6, 5, generator=generator)
        for some in (logits, rows):
            excluded = torch.rand(6, 5, generator=generator) < 0.4
            excluded[excluded.all(-1), 0] = False
            some[excluded] = -torch.inf
        probs = rows[:5].softmax(-1)
        proposal = Proposal.chain(randomness.categorical(probs), probs)
        verdict = verifier.verify(proposal, logits, SAMPLED, randomness)
        emitted = [*proposal.tokens[verdict.path].tolist(), verdict.next_token]
        assert all(logits[place, token] > -torch.inf for place, token in enumerate(emitted))


@pytest.mark.parametrize(
    "verifier", [GreedyMatch(), SpecVerification(3, 1.0)], ids=lambda rule: rule.name
)
def test_a_greedy_rule_with_a_temperature_is_refused(verifier):
    with pytest.raises(ValueError, match="temperature is 0.7"):
        check_pairing(NoDrafter(), STOPS["fixed"], verifier.rule, Sampling(temperature=0.7))


def test_names_are_those_of_reports():
    rules = GreedyMatch(), SpecVerification(3, 1), RejectionSampling()
    assert [rule.name for rule in rules] == ["greedy", "spec-verification(3,1.0)", "rejection"]
    assert [rule.lossless for rule in rules] == [True, False, True]


@pytest.mark.parametrize(("beta", "tau"), [(0, 1.0), (1, -0.1), (1, math.nan)])
def test_impossible_tolerances_are_refused(beta, tau):
    with pytest.raises(ValueError, match="beta|tau"):
        SpecVerification(beta, tau)


def test_a_probability_that_is_nan_is_never_an_acceptance():
    nan, half = float("nan"), torch.full((2, 2), 0.5)
    broken = torch.tensor([[nan, 0.5], [0.5, 0.5]])
    for target, draft in ((broken, half), (half, broken)):
        assert probability_ratio(target, draft, torch.tensor([0, 0])).tolist() == [0.0, 1.0]
