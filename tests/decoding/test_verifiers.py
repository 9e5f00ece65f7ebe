"""Verifiers on hand-computed cases."""

from __future__ import annotations

import math

import pytest
import torch

from drafttrain.config.methods import STOPS
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.types import Proposal, Sampling, Verdict
from drafttrain.decoding.verifiers import (
    BlockVerification,
    GreedyMatch,
    RejectionSampling,
    SpecVerification,
    acceptance_probability,
    check_pairing,
    residual,
)
from tests.decoding.decoded import drawn
from tests.decoding.enumeration import EnumeratedRandomness

GREEDY = Sampling()
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


def test_every_rule_takes_an_empty_draft():
    for verifier in (GreedyMatch(), SpecVerification(3, 1.0), RejectionSampling()):
        verdict = verifier.verify(Proposal.empty(), LOGITS[:1], GREEDY, NO_CHANCE)
        assert outcome(verdict) == ([], 0)


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


def test_acceptance_is_the_ratio_at_the_token_and_at_most_one():
    target_probs = torch.tensor([[0.2, 0.8], [0.9, 0.1], [0.0, 1.0]])
    draft_probs = torch.tensor([[0.4, 0.6], [0.5, 0.5], [0.5, 0.5]])
    accept = acceptance_probability(target_probs, draft_probs, torch.tensor([0, 0, 0]))
    assert accept.tolist() == pytest.approx([0.5, 1.0, 0.0])


def test_the_residual_is_what_target_has_in_excess():
    left = residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.6, 0.3]))
    assert left.tolist() == pytest.approx([1.0, 0.0, 0.0])
    left = residual(torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.2, 0.1, 0.7]))
    assert left.tolist() == pytest.approx([0.5, 0.5, 0.0])


def test_a_residual_of_zeros_falls_back_to_target():
    row = torch.tensor([0.25, 0.75])
    assert residual(row, row).tolist() == row.tolist()


class AlwaysRejects(EnumeratedRandomness):
    def accept_run(self, probs: torch.Tensor) -> int:
        return 0


def test_a_rejection_that_cannot_happen_gives_a_token_and_no_nan():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    probs = logits[:1].softmax(-1)
    proposal = Proposal.chain(torch.tensor([1]), probs)
    verdict = RejectionSampling().verify(
        proposal, logits, Sampling(temperature=1.0), AlwaysRejects()
    )
    assert verdict.next_token in (0, 1)


def test_rules_for_sampling_are_greedy_match_at_temperature_zero():
    for tokens in ([0, 1], [0, 2], [1, 1]):
        greedy = outcome(verify(GreedyMatch(), tokens))
        for rule in (RejectionSampling(), BlockVerification()):
            assert outcome(verify(rule, tokens)) == greedy


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
