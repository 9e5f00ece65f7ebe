"""Block verification: wrong variants are detected, and it accepts no less than rejection sampling.

test_exactness.py and test_stopping_exactness.py show by enumeration that it is lossless."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.roles import Randomness, Verifier
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.types import Proposal, Sampling, Verdict
from drafttrain.decoding.verifiers import (
    BlockVerification,
    RejectionSampling,
    acceptance_probability,
    block_rejection,
    prefix_weights,
    probability_ratio,
    residual,
)
from tests.decoding.decoded import decoder_of
from tests.decoding.enumeration import enumerate_law, enumerate_output, total_variation
from tests.decoding.expected import expected_probs
from tests.decoding.toys import LogitsTable, ToyDrafter, ToyTarget, autoregressive_law, toy_source

WIDE = Sampling(temperature=1.0)
BLOCK = BlockVerification()


def bias(verifier: Verifier) -> float:
    """Returns the total variation distance of the output distribution from the target's."""
    target, drafter = ToyTarget(1), ToyDrafter(2)
    decoder = decoder_of(target, drafter, 2, verifier, WIDE)
    law = enumerate_output(decoder, [toy_source()], 3)
    return total_variation(law, autoregressive_law(target, WIDE, 3))


def judge_chain(
    proposal: Proposal, logits: Tensor, sampling: Sampling, randomness: Randomness, choose: Callable
) -> Verdict:
    """Runs block verification with a replaced last step, (coins, weights, rows) -> ..."""
    target_probs = expected_probs(logits, sampling)
    if len(proposal.tokens) == 0:
        return BLOCK.verify(proposal, logits, sampling, randomness)
    draft_probs = proposal.draft_probs
    weights = prefix_weights(target_probs[:-1], draft_probs, proposal.tokens)
    rejection = block_rejection(weights, target_probs, draft_probs)
    accepted, weight = choose(rejection, weights, randomness)
    row = target_probs[accepted]
    if accepted < len(rejection):
        row = residual(row, draft_probs[accepted], weight(accepted))
    return Verdict(torch.arange(accepted), int(randomness.categorical(row[None])))


def right(rejection: Tensor, weights: list[float], randomness: Randomness):
    return len(rejection) - randomness.accept_run(rejection.flip(0)), weights.__getitem__


def first_rejected_coin(rejection: Tensor, weights: list[float], randomness: Randomness):
    """Wrong on purpose: the first failed coin ends the draft, as in token-by-token rejection."""
    return randomness.accept_run(1.0 - rejection), weights.__getitem__


def residual_without_weight(rejection: Tensor, weights: list[float], randomness: Randomness):
    """Wrong on purpose: the residual is Norm[(target - draft)+], as once in an engine."""
    return right(rejection, weights, randomness)[0], lambda accepted: 1.0


def weights_as_coins(rejection: Tensor, weights: list[float], randomness: Randomness):
    """Wrong on purpose: every coin has probability w_i, which is right only for the last."""
    missing = torch.tensor([1.0 - weight for weight in weights[1:]], dtype=torch.float64)
    return right(missing, weights, randomness)


def variant(choose: Callable):
    def verify(proposal, target_logits, sampling, randomness):
        return judge_chain(proposal, target_logits, sampling, randomness, choose)

    return replace(BLOCK, function=verify)


@pytest.mark.parametrize(
    "wrong",
    [first_rejected_coin, residual_without_weight, weights_as_coins],
    ids=lambda f: f.__name__,
)
def test_control_a_wrong_variant_is_detected(wrong):
    assert bias(variant(right)) < 1e-12
    assert bias(variant(wrong)) > 1e-3


def random_chain(seed: int, excluded: float, k: int = 3) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function from a path to target rows [k + 1, V] and draft rows [k, V]."""
    target, draft = (LogitsTable(seed + place, 3, excluded) for place in (0, 500))

    def rows(path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        heads = [path[:length] for length in range(k + 1)]
        logits = torch.stack([target[head] for head in heads])
        return logits, torch.stack([draft[head] for head in heads[:-1]]).softmax(-1)

    return rows


def accepted_law(tokens: tuple[int, ...], logits: Tensor, draft_probs: Tensor) -> Tensor:
    """Returns P(at least i tokens are accepted | the whole draft) for i = 1..k."""

    def run(randomness: Randomness) -> int:
        proposal = Proposal.chain(torch.tensor(tokens), draft_probs)
        return len(BLOCK.verify(proposal, logits, WIDE, randomness).path)

    law = enumerate_law(run)
    counts = range(1, len(tokens) + 1)
    survives = [sum(p for n, p in law.items() if n >= i) for i in counts]
    return torch.tensor(survives, dtype=torch.float64)


@pytest.mark.parametrize("excluded", [0.0, 0.4], ids=["full", "supports apart"])
@pytest.mark.parametrize("seed", range(3))
def test_every_drafted_prefix_is_accepted_with_its_weight_and_no_less_than_token_by_token(
    seed, excluded
):
    k, rows = 3, random_chain(seed, excluded)
    survives: dict[tuple[int, ...], float] = {}
    by_token: dict[tuple[int, ...], float] = {}
    weight: dict[tuple[int, ...], float] = {}
    drawn: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(3), repeat=k):
        logits, draft_probs = rows(path)
        tokens = torch.tensor(path)
        likely = draft_probs.gather(1, tokens[:, None])[:, 0].cumprod(0)
        if not likely[-1] > 0.0:
            continue
        law = accepted_law(path, logits, draft_probs)
        target_probs = expected_probs(logits, WIDE)[:-1]
        weights = prefix_weights(target_probs, draft_probs, tokens)
        single = acceptance_probability(target_probs, draft_probs, tokens).cumprod(0)
        for length in range(1, k + 1):
            head = path[:length]
            survives[head] = survives.get(head, 0.0) + float(likely[-1] * law[length - 1])
            drawn[head] = drawn.get(head, 0.0) + float(likely[-1])
            by_token[head], weight[head] = float(single[length - 1]), weights[length]
    for head, probability in drawn.items():
        assert abs(survives[head] / probability - weight[head]) < 1e-12
        assert weight[head] >= by_token[head] - 1e-15
    whole = sum(survives.values())
    assert whole >= sum(drawn[head] * by_token[head] for head in drawn)


def test_it_accepts_more_than_token_by_token_where_a_later_token_makes_up_for_an_earlier_one():
    """Sun et al. 2024, Section 2: B has target probability 1/3 and draft probability 2/3; mean
    accepted tokens are 10/9 and 11/9."""
    target, draft = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64) / 3.0
    logits, rows = target.log().expand(3, 2), draft.expand(2, 2)
    expected = {}
    for name, verifier in (("block", BLOCK), ("rejection", RejectionSampling())):

        def run(randomness: Randomness, verifier=verifier) -> int:
            proposal = Proposal.chain(randomness.categorical(rows), rows)
            return len(verifier.verify(proposal, logits, WIDE, randomness).path)

        expected[name] = sum(n * p for n, p in enumerate_law(run).items())
    assert expected["rejection"] == pytest.approx(10 / 9)
    assert expected["block"] == pytest.approx(11 / 9)


def test_weights_and_coins_by_hand():
    target = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.5, 0.5]], dtype=torch.float64)
    draft = torch.tensor([[0.6, 0.4], [0.2, 0.8]], dtype=torch.float64)
    weights = prefix_weights(target[:-1], draft, torch.tensor([0, 0]))
    assert weights == pytest.approx([1.0, 0.5, 1.0])  # 0.5 * 3, at most 1
    # r_1 = (0.3 - 0.2)+ + (0.2 - 0.8)+ = 0.1, h_1 = 0.1 / 0.6; h_2 = 1
    assert block_rejection(weights, target, draft).tolist() == pytest.approx([1 - 0.1 / 0.6, 0.0])
    assert residual(target[1], draft[1], 0.5).tolist() == pytest.approx([1.0, 0.0])
    assert residual(target[1], target[1], 0.5).tolist() == pytest.approx(target[1].tolist())


def test_zero_over_zero_is_1_and_has_no_effect():
    row = torch.tensor([0.25, 0.75], dtype=torch.float64)
    weights = prefix_weights(row.expand(2, 2), row.expand(2, 2), torch.tensor([1, 0]))
    assert weights == [1.0, 1.0, 1.0]
    assert block_rejection(weights, row.expand(3, 2), row.expand(2, 2)).tolist() == [0.0, 0.0]


def test_supports_apart_reject_everything_and_give_no_nan():
    """In float32 with the production random source; target and draft share no token."""
    randomness = SampledRandomness(torch.Generator().manual_seed(0))
    logits = torch.tensor([[0.0, -torch.inf, 1.0]] * 4)
    for rows in (torch.tensor([[0.0, 1.0, 0.0]] * 3), None):
        for tokens in ([1, 1, 1], [0, 1, 1]):
            if rows is not None and tokens[0] == 0:
                continue
            proposal = Proposal.chain(torch.tensor(tokens), rows)
            verdict = BLOCK.verify(proposal, logits, WIDE, randomness)
            assert verdict.next_token in (0, 2)
            assert len(verdict.path) <= tokens.count(0)


def test_random_rows_in_float32_keep_their_supports_and_are_finite():
    generator = torch.Generator().manual_seed(0)
    randomness = SampledRandomness(generator)
    for _ in range(300):
        logits = 6.0 * torch.randn(6, 5, generator=generator)
        logits[torch.rand(6, 5, generator=generator) < 0.4] = -torch.inf
        logits[:, 0] = torch.where(torch.isinf(logits).all(-1), 0.0, logits[:, 0])
        rows = 6.0 * torch.randn(5, 5, generator=generator)
        rows[torch.rand(5, 5, generator=generator) < 0.4] = -torch.inf
        rows[:, 1] = torch.where(torch.isinf(rows).all(-1), 0.0, rows[:, 1])
        probs = rows.softmax(-1)
        proposal = Proposal.chain(randomness.categorical(probs), probs)
        verdict = BLOCK.verify(proposal, logits, WIDE, randomness)
        emitted = [*proposal.tokens[: len(verdict.path)].tolist(), verdict.next_token]
        for place, token in enumerate(emitted):
            assert logits[place, token] > -torch.inf
        ratio = probability_ratio(expected_probs(logits[:-1], WIDE), probs, proposal.tokens)
        weights = prefix_weights(expected_probs(logits[:-1], WIDE), probs, proposal.tokens)
        assert torch.isfinite(ratio).all() and all(0.0 <= weight <= 1.0 for weight in weights)
        coins = block_rejection(weights, expected_probs(logits, WIDE), probs)
        assert ((coins >= 0.0) & (coins <= 1.0)).all()
