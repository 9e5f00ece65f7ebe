"""Lossless decoding follows the target's distribution exactly: enumerates production code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.roles import Drafter, Randomness, Verifier
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Branching, Paths
from drafttrain.decoding.trees.shapes import Shape
from drafttrain.decoding.trees.verifiers import (
    MultiRound,
    RecursiveRejection,
    TargetWalk,
)
from drafttrain.decoding.types import Proposal, Sampling, Source, Verdict
from drafttrain.decoding.verifiers import BlockVerification, RejectionSampling, verify_rejection
from tests.decoding.decoded import decoder_of
from tests.decoding.enumeration import enumerate_law, enumerate_output, total_variation
from tests.decoding.expected import chi_square, expected_probs
from tests.decoding.test_batch_exactness import law_of_model
from tests.decoding.toys import (
    EOS,
    START,
    ToyDrafter,
    ToyModel,
    ToyTarget,
    autoregressive_law,
    toy_prompt,
    toy_source,
)
from tests.tiny_models import tiny_model

SAMPLINGS = {
    "temperature 1": Sampling(temperature=1.0),
    "temperature 0.6": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.3, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "min-p": Sampling(temperature=1.3, min_p=0.3),
    "all": Sampling(temperature=0.8, top_k=3, top_p=0.9),
    "greedy": Sampling(temperature=0.0),
}


def output_law(
    target: ToyTarget | CachedModel,
    drafter: Drafter,
    sampling: Sampling,
    k: int,
    max_new_tokens: int,
    verifier: Verifier | None = None,
    source: Source | None = None,
) -> dict[tuple[int, ...], float]:
    decoder = decoder_of(target, drafter, k, verifier or RejectionSampling(), sampling)
    return enumerate_output(decoder, [source or toy_source()], max_new_tokens)


RULES = {"rejection": RejectionSampling(), "block": BlockVerification()}
for_every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


DRAFTERS = {
    "drawn": ToyDrafter(2),
    "point mass": ToyDrafter(2, point=True),
    "none": NoDrafter(),
}


@for_every_rule
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_sampling_follows_the_target_exactly(sampling, drafter, rule):
    if sampling.greedy:
        expected = autoregressive_law_greedy(ToyTarget(1), 3)
    else:
        expected = autoregressive_law(ToyTarget(1), sampling, 3)
    law = output_law(ToyTarget(1), drafter, sampling, 2, 3, rule)
    assert total_variation(law, expected) < 1e-12


def autoregressive_law_greedy(target: ToyTarget, max_new_tokens: int) -> dict:
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1:] != [EOS]:
        tokens.append(int(target.table[(0, *tokens)].argmax()))
    return {tuple(tokens): 1.0}


@for_every_rule
@pytest.mark.parametrize(
    ("vocabulary", "excluded", "point"),
    [(4, 0.5, False), (3, 0.0, False), (3, 0.0, True)],
    ids=["supports apart", "drawn", "point mass"],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_whole_round_of_depth_three_and_its_bonus_are_exact(
    seed, vocabulary, excluded, point, rule
):
    target = ToyTarget(10 + seed, vocabulary, excluded)
    drafter = ToyDrafter(20 + seed, vocabulary, excluded, point)
    sampling = Sampling(temperature=1.0)
    law = output_law(target, drafter, sampling, 3, 4, rule)
    assert total_variation(law, autoregressive_law(target, sampling, 4)) < 1e-12


def test_a_real_model_with_its_cache_and_its_bad_words_is_exact():
    """Marian with four tokens, one of them excluded; caches are rolled back on every path."""
    model = tiny_model("marian", vocab_size=4, decoder_vocab_size=4)
    model.generation_config.bad_words_ids = [[0]]
    target, sampling = CachedModel(model), Sampling(temperature=1.2)
    source = make_source([2, 3, 3], model)
    law = output_law(target, ToyDrafter(2, vocabulary=4), sampling, 2, 3, source=source)

    expected = law_of_model(model, source, sampling, 3, NoBadWordsLogitsProcessor([[0]]))
    assert len(expected) > 10
    assert total_variation(law, expected) < 1e-12


PAIRS_AFTER_EOS = [[EOS, token] for token in range(4)]
PROCESSORS = {
    "repetition": RepetitionPenaltyLogitsProcessor(1.8),
    "no token twice": NoRepeatNGramLogitsProcessor(1),
    "nothing after EOS": NoBadWordsLogitsProcessor(PAIRS_AFTER_EOS),
}
"""The last two exclude every token in some rows after an EOS within a draft."""


def over(shape: Shape) -> TreeDrafter:
    return TreeDrafter(CausalDrafter(ToyModel(2, 4)), shape)


PROCESSED = {
    "chain": (ToyDrafter(2, 4), RejectionSampling()),
    "point masses": (ToyDrafter(2, 4, point=True), RejectionSampling()),
    "chain, by blocks": (ToyDrafter(2, 4), BlockVerification()),
    "point masses, by blocks": (ToyDrafter(2, 4, point=True), BlockVerification()),
    "copies, by blocks": (MaxGramDrafter([2, 3, 1, 2]), BlockVerification()),
    "opt-tree": (over(Optimal(5)), TargetWalk),
    "rsd-c": (over(Branching((2, 1))), RecursiveRejection),
    "paths": (over(Paths(2)), MultiRound),
}


@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("setting", PROCESSORS)
def test_sampling_under_logits_processors_follows_the_target_exactly(setting, name):
    drafter, verifier = PROCESSED[name]
    top_k = (2 if name == "paths" else 3) if drafter.drafts_trees else 0
    sampling = Sampling(1.0, top_k=top_k)
    target = ToyTarget(1, 4, processors=[PROCESSORS[setting]])
    source = toy_prompt() if drafter.drafts_trees else toy_source()
    law = output_law(target, drafter, sampling, 2, 3, verifier, source)
    assert total_variation(law, autoregressive_law(target, sampling, 3)) < 1e-12


def without_residual(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
) -> Verdict:
    """Wrong on purpose: samples from the target instead of the residual after a rejection."""
    verdict = verify_rejection(proposal, target_logits, sampling, randomness)
    if len(verdict.path) == len(proposal.tokens):
        return verdict
    row = expected_probs(target_logits, sampling)[len(verdict.path)]
    return Verdict(verdict.path, int(randomness.categorical(row[None])))


def test_control_a_verifier_without_residual_is_detected():
    target, sampling = ToyTarget(1), Sampling(temperature=1.0)
    verifier = replace(RejectionSampling(), function=without_residual)
    law = output_law(target, ToyDrafter(2), sampling, 2, 3, verifier=verifier)
    assert total_variation(law, autoregressive_law(target, sampling, 3)) > 0.01


class AcceptsLess(SampledRandomness):
    """Wrong on purpose: drops one acceptance in forty."""

    def accept_run(self, probs: Tensor) -> int:
        return super().accept_run(0.975 * probs)


@pytest.mark.parametrize("kind", [SampledRandomness, AcceptsLess], ids=lambda kind: kind.__name__)
def test_sampled_chance_has_the_law_that_is_enumerated(kind):
    """Rounds with the production random source; the control shows that the test detects errors."""
    target, drafter, sampling = ToyTarget(1), ToyDrafter(2), Sampling(temperature=1.0)

    def run(randomness: Randomness) -> tuple[int, ...]:
        session = drafter.open(toy_source(), sampling, randomness)
        proposal = session.propose(torch.tensor([START]), None, FixedLength(2))
        paths = [(START, *proposal.tokens[:length].tolist()) for length in range(3)]
        logits = torch.stack([target.table[path] for path in paths])
        verdict = RejectionSampling().verify(proposal, logits, sampling, randomness)
        return (*proposal.tokens.tolist(), len(verdict.path), verdict.next_token)

    randomness = kind(torch.Generator().manual_seed(0))
    counts = Counter(run(randomness) for _ in range(20_000))
    assert (chi_square(counts, enumerate_law(run)) > 1e-3) == (kind is SampledRandomness)
