"""Scores that are not finite are refused where the output depends on them, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.finite import on_finite_scores
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.types import NotFinite, Proposal, Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling

DRAFT = Proposal.chain(torch.tensor([2, 1]))
"""Tokens 2 and 1, of which the target takes the first."""
LOGITS = torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])


def verify(logits: torch.Tensor, make=GreedyMatch, temperature: float = 0.0) -> list[int]:
    sampling, randomness = Sampling(temperature), sequence_randomness(0, 0)
    verdict = on_finite_scores(make()).verify(DRAFT, logits, sampling, randomness)
    return [*DRAFT.tokens[verdict.path].tolist(), verdict.next_token]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_on_the_accepted_path_count_alone(value: float) -> None:
    assert verify(LOGITS) == [2, 0]
    for row, expected in ((0, None), (1, None), (2, [2, 0])):
        logits = LOGITS.clone()
        logits[row] = value
        if expected is None:
            with pytest.raises(NotFinite):
                verify(logits)
        else:
            assert verify(logits) == expected


def test_tokens_that_are_forbidden_do_no_harm() -> None:
    logits = LOGITS.masked_fill(LOGITS == 0.0, -torch.inf)
    assert verify(logits) == [2, 0]
    assert verify(logits, RejectionSampling, 1.0) == [2, 0]


def test_sampling_says_the_same() -> None:
    with pytest.raises(NotFinite):
        verify(LOGITS * torch.nan, RejectionSampling, 1.0)


def test_a_rule_keeps_its_name_and_what_it_takes() -> None:
    rule = on_finite_scores(GreedyMatch())
    assert (rule.name, rule.rule) == ("greedy", GreedyMatch().rule)
