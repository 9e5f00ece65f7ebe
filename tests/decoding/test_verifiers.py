"""Verifiers on hand-computed cases; test_exactness.py shows by enumeration which are lossless."""

import math

import pytest
import torch

from drafttrain.config.methods import STOPS
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.types import Proposal, Sampling, Verdict
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
NO_CHANCE = EnumeratedRandomness()

LOGITS = torch.tensor(
    [
        [4.0, 3.0, 2.0, 0.0],  # verifies draft token 0
        [0.0, 5.0, 4.5, 4.0],  # verifies draft token 1
        [1.0, 0.0, 3.0, 2.5],  # follows both
    ]
)


def verify(verifier, tokens: list[int], logits=LOGITS, sampling=GREEDY) -> Verdict:
    randomness = drawn()
    return verifier.verify(Proposal.chain(torch.tensor(tokens)), logits, sampling, randomness)


def outcome(verdict: Verdict) -> tuple[list[int], int]:
    return verdict.path.tolist(), verdict.next_token


def test_greedy_match_replaces_the_first_mismatch_by_the_arg_max():
    assert outcome(verify(GreedyMatch(), [0, 1])) == ([0, 1], 2)  # bonus
    assert outcome(verify(GreedyMatch(), [0, 2])) == ([0], 1)  # correction
    assert outcome(verify(GreedyMatch(), [1, 1])) == ([], 0)  # later matches do not count


def test_spec_verification_needs_rank_and_gap():
    assert outcome(verify(SpecVerification(2, 1.0), [1, 2])) == ([0, 1], 2)
    assert outcome(verify(SpecVerification(1, 1.0), [1, 2])) == ([], 0)  # rank 2 > beta
    assert outcome(verify(SpecVerification(3, 0.9), [1, 2])) == ([], 0)  # gap 1.0 > tau
    assert outcome(verify(SpecVerification(3, 1.0), [0, 0])) == ([0], 1)


def test_a_gap_equal_to_tau_passes_and_the_next_float_does_not():
    exact, just_below = SpecVerification(4, 2.0), SpecVerification(4, math.nextafter(2.0, 0.0))
    assert outcome(verify(exact, [2, 1], LOGITS.double())) == ([0, 1], 2)
    assert outcome(verify(just_below, [2, 1], LOGITS.double())) == ([], 0)


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
        assert outcome(spec) == outcome(verify(GreedyMatch(), tokens, logits))
    tied = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert outcome(verify(SpecVerification(1, 0.0), [1], tied)) == ([0], 2)
    assert outcome(verify(GreedyMatch(), [1], tied)) == ([], 0)


def test_beta_beyond_the_vocabulary_is_clamped():
    assert outcome(verify(SpecVerification(100, 50.0), [3, 0])) == ([0, 1], 2)


def test_an_excluded_token_never_passes():
    logits = torch.tensor([[1.0, -torch.inf, 0.0], [0.0, 1.0, 0.0]])
    assert outcome(verify(SpecVerification(3, 1e9), [1], logits)) == ([], 0)


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
    draft_probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    proposal = Proposal(
        tokens=torch.tensor([1, 0]),
        parents=torch.tensor([-1, 0]),
        draw_kind="iid",
        draft_probs=draft_probs,
        rows=torch.tensor([1, 0]),
    )
    logits = torch.zeros(3, 2)
    seen: list[list[float]] = []

    class Watches(AlwaysRejects):
        def accept_run(self, probs: torch.Tensor) -> int:
            seen.append(probs.tolist())
            return 2

    RejectionSampling().verify(proposal, logits, Sampling(temperature=1.0), Watches())
    assert seen == [[0.5, 0.5]]


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
    assert GreedyMatch().name == "greedy"
    assert SpecVerification(3, 1).name == "spec-verification(3,1.0)"
    assert RejectionSampling().name == "rejection"
    assert [v.lossless for v in (GreedyMatch(), SpecVerification(3, 1.0), RejectionSampling())] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("beta", "tau"), [(0, 1.0), (1, -0.1), (1, math.nan)])
def test_impossible_tolerances_are_refused(beta, tau):
    with pytest.raises(ValueError, match="beta|tau"):
        SpecVerification(beta, tau)


def test_a_probability_that_is_nan_is_never_an_acceptance():
    nan, half = float("nan"), torch.full((2, 2), 0.5)
    broken = torch.tensor([[nan, 0.5], [0.5, 0.5]])
    for target, draft in ((broken, half), (half, broken)):
        assert probability_ratio(target, draft, torch.tensor([0, 0])).tolist() == [0.0, 1.0]
