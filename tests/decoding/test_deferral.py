"""Deferral rules: the output follows their mixture exactly, at every token; refusals; by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafttrain.config.verifiers import DEFERRALS
from drafttrain.decoding.deferral import defers, mix, rows_of, verify_deferral
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import SampledRandomness, sequence_randomness, warp
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Proposal, Sampling, Verdict
from drafttrain.decoding.verifiers import (
    Deferral,
    GreedyMatch,
    RejectionSampling,
    check_pairing,
)
from tests.decoding.enumeration import (
    alone_and_together,
    enumerate_law,
    enumerate_output,
    replaced,
    total_variation,
)
from tests.decoding.toys import (
    EOS,
    START,
    ToyModel,
    ToyTarget,
    autoregressive_law,
    toy_prompt,
    toys_together,
)
from tests.tiny_models import near_copy, tiny_model

SAMPLINGS = {
    "temperature 1": Sampling(temperature=1.0),
    "temperature 0.6": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.3, top_k=2),
    "all": Sampling(temperature=0.8, top_k=3, top_p=0.9),
    "greedy": Sampling(),
}
WIDE = SAMPLINGS["temperature 1"]
MEDIUM = {"chow": 0.4, "diff": 0.1, "opt": 0.3, "token-v1": 0.3, "token-v2": 0.3, "token-v3": 0.5}
"""Values of alpha at which both models have a say."""
STRICT = {rule: -1.0 for rule in DEFERRALS} | {"opt": -1e6}
"""Values of alpha at which the target decides everything."""
LAX = {rule: 1.0 for rule in DEFERRALS} | {"opt": 1e6}
"""Values of alpha at which the drafter does."""


def output_law(
    verifier, sampling: Sampling, seeds: tuple[int, int] = (1, 2), k: int = 2, longest: int = 3,
    together: int = 1, excluded: float = 0.0,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """Of production code: a language model drafts for a target, every random outcome summed."""
    target = ToyTarget(seeds[0], excluded=excluded)
    drafter = CausalDrafter(ToyModel(seeds[1], excluded=excluded))
    decoder = Decoder(target, drafter, FixedLength(k), verifier, sampling, replaced)
    return enumerate_output(decoder, toys_together(toy_prompt, together), longest)


def cascade_law(
    rule: str, alpha: float, sampling: Sampling, seeds: tuple[int, int] = (1, 2), longest: int = 3,
    excluded: float = 0.0,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """Of the sequential cascade, token by token, from the definitions: no drafts, no tensors."""
    large, small = (ToyTarget(seed, excluded=excluded).table for seed in seeds)
    law: dict[tuple[int, ...], float] = {}

    def extend(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == longest or tokens[-1:] == (EOS,):
            law[tokens] = probability
            return
        row = direct_mixture(rule, alpha, large[START, *tokens], small[START, *tokens], sampling)
        for token, share in enumerate(row):
            if share > 0.0:
                extend((*tokens, token), probability * share)

    extend((), 1.0)
    return law


def direct_mixture(rule: str, alpha: float, large, small, sampling: Sampling) -> list[float]:
    """pi of one row, number by number, by the paper's definitions."""
    p, q = softmax(large.tolist()), softmax(small.tolist())
    p_used, q_used = decoded_from(large, sampling), decoded_from(small, sampling)
    allowed = [share > 0.0 for share in p]
    q, q_used = only(q, allowed), only(q_used, allowed)
    if q_used is None:
        return p_used
    q = q or p
    distance = 0.5 * sum(abs(a - b) for a, b in zip(p_used, q_used, strict=True))
    row = [0.0] * len(p)
    for token, share in enumerate(q_used):
        if {
            "chow": max(q) >= 1 - alpha,
            "diff": max(q) >= max(p) - alpha,
            "opt": max(q) >= max(p) - alpha * distance,
            "token-v1": q[token] >= max(p) - alpha,
            "token-v2": p[token] >= max(p) - alpha,
            "token-v3": p[token] >= (1 - alpha) * max(p),
        }[rule]:
            row[token] += share
        else:  # the small model's choice is thrown away, the large one chooses
            row = [mine + share * other for mine, other in zip(row, p_used, strict=True)]
    return row


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def decoded_from(scores, sampling: Sampling) -> list[float]:
    """By Transformers' own warpers; in greedy decoding all on the arg-max."""
    if sampling.greedy:
        return [float(token == int(scores.argmax())) for token in range(len(scores))]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return softmax(warpers(None, scores[None])[0].tolist())


def only(probs: list[float], allowed: Sequence[bool]) -> list[float] | None:
    """The row on what is allowed; None where nothing is left."""
    kept = [share * keep for share, keep in zip(probs, allowed, strict=True)]
    return [share / sum(kept) for share in kept] if sum(kept) > 0.0 else None


def distance(law: dict, other: dict) -> float:
    assert abs(sum(law.values()) - 1.0) < 1e-12
    assert abs(sum(other.values()) - 1.0) < 1e-12
    return max(abs(law.get(x, 0.0) - other.get(x, 0.0)) for x in law.keys() | other.keys())


@pytest.mark.parametrize(("sampling", "together"), alone_and_together(SAMPLINGS))
@pytest.mark.parametrize("rule", DEFERRALS)
def test_the_output_follows_the_mixture_at_every_token_the_last_included(rule, sampling, together):
    alpha = MEDIUM[rule]
    law = output_law(Deferral(rule, alpha), sampling, together=together)
    assert distance(law, cascade_law(rule, alpha, sampling)) < 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", DEFERRALS)
def test_supports_that_do_not_contain_each_other_stay_exact(rule, seed):
    seeds, alpha = (30 + seed, 60 + seed), MEDIUM[rule]
    law = output_law(Deferral(rule, alpha), WIDE, seeds, k=3, excluded=0.4)
    assert distance(law, cascade_law(rule, alpha, WIDE, seeds, excluded=0.4)) < 1e-12


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("rule", ["opt", "token-v3"])
def test_the_law_does_not_depend_on_how_much_is_drafted(rule, k):
    expected = cascade_law(rule, MEDIUM[rule], WIDE)
    assert distance(output_law(Deferral(rule, MEDIUM[rule]), WIDE, k=k), expected) < 1e-12


@pytest.mark.parametrize("rule", DEFERRALS)
def test_control_the_mixture_is_neither_the_targets_law_nor_the_drafters(rule):
    law = output_law(Deferral(rule, MEDIUM[rule]), WIDE)
    for seed in (1, 2):
        assert total_variation(law, autoregressive_law(ToyTarget(seed), WIDE, 3)) > 0.01


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("rule", DEFERRALS)
def test_at_one_end_of_alpha_the_law_is_the_targets_and_at_the_other_the_drafters(rule, sampling):
    for alphas, seed in ((STRICT, 1), (LAX, 2)):
        law = output_law(Deferral(rule, alphas[rule]), sampling)
        table = ToyTarget(seed).table
        assert distance(law, law_of_table(table, sampling)) < 1e-12


def law_of_table(table, sampling: Sampling) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {}

    def extend(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == 3 or tokens[-1:] == (EOS,):
            law[tokens] = probability
            return
        for token, share in enumerate(decoded_from(table[START, *tokens], sampling)):
            if share > 0.0:
                extend((*tokens, token), probability * share)

    extend((), 1.0)
    return law


def bonus_of_target(
    proposal: Proposal, target_logits, sampling: Sampling, randomness: Randomness, **settings
) -> Verdict:
    """Wrong on purpose: one more token from the target's row behind a whole draft."""
    verdict = verify_deferral(proposal, target_logits, sampling, randomness, **settings)
    if verdict.next_token is not None:
        return verdict
    row = warp(target_logits[-1:], sampling)
    return Verdict(verdict.path, int(randomness.categorical(row)))


def residual_of_target(
    proposal: Proposal, target_logits, sampling: Sampling, randomness: Randomness, **settings
) -> Verdict:
    """Wrong on purpose: what follows a rejection is drawn from the mixture, not from its excess."""
    verdict = verify_deferral(proposal, target_logits, sampling, randomness, **settings)
    if verdict.next_token is None or len(proposal.tokens) == 0:
        return verdict
    rows = rows_of(proposal, target_logits[: len(proposal.tokens)], sampling)
    row = mix(rows, defers(settings["rule"], settings["alpha"], rows))[len(verdict.path)]
    return Verdict(verdict.path, int(randomness.categorical(row[None])))


def test_control_a_bonus_token_of_the_target_is_found_out():
    right = Deferral("opt", 0.3)
    wrong = replace(right, rule=replace(right.rule, adds_token=True), function=bonus_of_target)
    expected = cascade_law("opt", 0.3, WIDE)
    assert total_variation(output_law(wrong, WIDE), expected) > 1e-3


def test_control_a_rejection_without_residual_is_found_out():
    wrong = replace(Deferral("opt", 0.3), function=residual_of_target)
    assert total_variation(output_law(wrong, WIDE), cascade_law("opt", 0.3, WIDE)) > 1e-3


P = torch.tensor([[0.5, 0.4, 0.1]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.7, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "alpha", "expected"),
    [
        ("chow", 0.25, [0.5, 0.4, 0.1]),  # 0.7 < 0.75
        ("chow", 0.35, [0.2, 0.7, 0.1]),
        ("diff", -0.25, [0.5, 0.4, 0.1]),  # 0.7 < 0.75
        ("diff", 0.0, [0.2, 0.7, 0.1]),  # more sure than the target, though of another token
        ("opt", -0.7, [0.5, 0.4, 0.1]),  # 0.7 < 0.5 + 0.7 * 0.3
        ("opt", -0.6, [0.2, 0.7, 0.1]),
        ("token-v1", 0.25, [0.5 * 0.3, 0.7 + 0.4 * 0.3, 0.1 * 0.3]),  # q >= 0.25: token 1
        ("token-v2", 0.05, [0.2 + 0.5 * 0.8, 0.4 * 0.8, 0.1 * 0.8]),  # p >= 0.45: token 0
        ("token-v2", 0.15, [0.2 + 0.05, 0.7 + 0.04, 0.01]),  # p >= 0.35: tokens 0 and 1
        ("token-v3", 0.25, [0.2 + 0.05, 0.7 + 0.04, 0.01]),  # p >= 0.375
    ],
)
def test_the_mixture_by_hand(rule, alpha, expected):
    proposal = Proposal.chain(torch.tensor([1]), Q, logits=lambda: Q.log().unbind())
    rows = rows_of(proposal, P.log(), WIDE)
    assert mix(rows, defers(rule, alpha, rows))[0].tolist() == pytest.approx(expected)


def greedy_outcome(rule: str, alpha: float, token: int) -> tuple[list[int], int | None]:
    randomness = SampledRandomness(torch.Generator().manual_seed(0))
    proposal = Proposal.chain(torch.tensor([token]), logits=lambda: Q.log().unbind())
    verdict = Deferral(rule, alpha).verify(proposal, P.log(), Sampling(), randomness)
    return verdict.path.tolist(), verdict.next_token


def test_greedy_decoding_keeps_the_drafters_choice_or_takes_the_targets_by_unwarped_rows():
    assert greedy_outcome("token-v3", 0.25, 1) == ([0], None)  # 0.4 >= 0.375
    assert greedy_outcome("token-v3", 0.15, 1) == ([], 0)  # 0.4 < 0.425
    assert greedy_outcome("chow", 0.35, 1) == ([0], None)
    assert greedy_outcome("chow", 0.25, 1) == ([], 0)
    assert greedy_outcome("opt", -0.15, 1) == ([0], None)  # 0.7 >= 0.5 + 0.15, D_TV is 1
    assert greedy_outcome("opt", -0.25, 1) == ([], 0)
    assert greedy_outcome("chow", 0.25, 0) == ([0], None)  # the target's own token


def test_a_token_that_the_targets_processors_exclude_is_never_emitted():
    logits = P.log().clone()
    logits[0, 1] = -torch.inf
    proposal = Proposal.chain(torch.tensor([1]), Q, logits=lambda: Q.log().unbind())
    for rule in DEFERRALS:
        law = enumerate_law(
            lambda randomness, rule=rule: (
                Deferral(rule, LAX[rule]).verify(proposal, logits, WIDE, randomness).next_token
            )
        )
        assert set(law) <= {0, 2}
        assert law[0] == pytest.approx(2 / 3)  # Norm[(q' - q)+] with q' = (2/3, 0, 1/3)
        assert greedy_outcome(rule, STRICT[rule], 1) == ([], 0)


def test_a_draft_that_is_accepted_whole_ends_the_round():
    randomness = SampledRandomness(torch.Generator().manual_seed(0))
    row = torch.tensor([0.0, 1.0, 0.0])
    proposal = Proposal.chain(torch.tensor([1, 1]), row.softmax(-1).expand(2, 3),
                              logits=lambda: [row, row])  # fmt: skip
    verifier = Deferral("chow", 1.0)
    verdict = verifier.verify(proposal, torch.zeros(2, 3), WIDE, randomness)
    assert verdict.path.tolist() == [0, 1] and verdict.next_token is None
    assert verdict.kept.tolist() == [0] and len(verdict.emitted_probs) == 2
    assert verifier.fed(proposal).tokens.tolist() == [1]  # no row behind the last one


def test_rounds_count_all_that_was_accepted_and_no_token_more():
    target, drafter = ToyTarget(7), CausalDrafter(ToyModel(7))  # the same tables

    def run(randomness: Randomness) -> tuple:
        decoder = Decoder(
            target, drafter, FixedLength(2), Deferral("opt", 0.0), WIDE, lambda _: randomness
        )
        [output] = decoder.decode_all([toy_prompt()], 4)
        for played in output.rounds:
            assert len(played.path) == len(played.drafted) == len(played.emitted)
        return tuple(output.tokens)

    assert distance(enumerate_law(run), autoregressive_law(target, WIDE, 4)) < 1e-12


@pytest.mark.parametrize("together", [1, 3])
def test_on_real_models_the_strict_end_is_plain_decoding_up_to_the_last_position(together):
    """The cache is rolled back after whole drafts; no token is fed that has no position."""
    model = tiny_model("gpt2")
    model.generation_config.eos_token_id = None
    drafter = CausalDrafter(CachedModel(near_copy(model, 0.05, seed=1)))
    prompts = [torch.arange(4, 7 + length) for length in range(together)]
    sources = [make_source(prompt, model) for prompt in prompts]
    longest = model.config.n_positions
    found = {}
    for name, verifier in {
        "greedy": GreedyMatch(), "strict": Deferral("token-v3", -1.0), "lax": Deferral("opt", 0.5)
    }.items():  # fmt: skip
        decoder = Decoder(CachedModel(model), drafter, FixedLength(4), verifier, Sampling(),
                          lambda row: sequence_randomness(0, row))  # fmt: skip
        outputs = decoder.decode_all(sources, longest, batch_size=together)
        found[name] = [output.tokens for output in outputs]
    assert found["strict"] == found["greedy"] != found["lax"]
    for prompt, tokens in zip(prompts, found["greedy"], strict=True):
        assert len(prompt) + len(tokens) == longest + 1  # the last token is not fed


def test_drafters_without_rows_are_refused_by_name_and_no_draft_at_all_is_the_targets_own():
    for sampling in (Sampling(), WIDE):
        with pytest.raises(ValueError, match="goes by the drafter's rows, but drafter 'max-gram'"):
            check_pairing(MaxGramDrafter(), FixedLength(2), Deferral("opt", 0.1), sampling)
        check_pairing(NoDrafter(), FixedLength(2), Deferral("opt", 0.1), sampling)
    with pytest.raises(ValueError, match="comes without"):
        proposal = Proposal.chain(torch.tensor([1]), Q)
        Deferral("opt", 0.1).verify(proposal, P.log(), WIDE, None)


def test_its_name_and_its_settings():
    assert Deferral("opt", 0.25).name == "deferral(opt,0.25)"
    assert not Deferral("opt", 0.25).lossless and RejectionSampling().adds_token
    for rule, alpha in (("opt", math.nan), ("opt", math.inf), ("best", 0.1)):
        with pytest.raises(ValueError, match="deferral needs rule to be one of chow"):
            Deferral(rule, alpha)
