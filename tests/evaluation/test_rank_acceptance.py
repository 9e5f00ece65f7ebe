"""Acceptance by rank: hand-computed on scripted rows, and on average the target's distribution."""

import pytest
import torch

from drafttrain.config.decode import SamplingConfig
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.evaluation.plan import measure_acceptance_by_rank
from drafttrain.evaluation.prompts import Prompt
from tests.decoding.toys import ToyModel, toy_prompt
from tests.evaluation.scripted import plain_tokens
from tests.tiny_models import tiny_model

PROMPTS = [[5, 6, 7], [9, 3, 30], [12, 4, 20, 33]]
LENGTH = 9


def greedy_ranks(ranks: int, seed: int = 5) -> tuple[float, ...]:
    """Measures acceptance by rank on three prompts."""
    model, drafter = tiny_model("llama", seed=3), tiny_model("llama", seed=seed)
    prompts = [Prompt(row, "", None, make_source(ids, model)) for row, ids in enumerate(PROMPTS)]
    own = CachedModel(model), CausalDrafter(CachedModel(drafter))
    sampling = SamplingConfig(max_new_tokens=LENGTH)
    return measure_acceptance_by_rank(*own, sampling, prompts, ranks)


def test_a_drafter_that_is_the_target_has_the_token_as_its_first_choice():
    assert greedy_ranks(4, seed=3) == (1.0, 0.0, 0.0, 0.0)


def test_greedy_shares_are_those_of_the_rounds_that_drafted():
    """With all 40 tokens as one level every round accepts a token; bonus tokens do not count."""
    measured = greedy_ranks(100)
    assert len(measured) == 40
    assert sum(measured) == pytest.approx(1.0, abs=1e-12)
    model = tiny_model("llama", seed=3)
    judged = []
    for ids in PROMPTS:
        tokens = plain_tokens(model, ids, LENGTH)
        with torch.inference_mode():
            logits = tiny_model("llama", seed=5)(torch.tensor([ids + tokens])).logits[0]
        # rounds of two tokens; the last token is drafted only if one more fits after it
        for place in range(0, len(tokens), 2):
            if place < LENGTH - 1:
                row = logits[len(ids) + place - 1]
                judged.append(int((row > row[tokens[place]]).sum()))
    assert measured == tuple(judged.count(rank) / len(judged) for rank in range(40))


def test_sampled_shares_are_the_targets_probabilities_of_the_drafters_choices():
    """One token per prompt: the shares converge to t(rank) of one known row."""
    target, drafter = ToyModel(1), ToyModel(2)
    prompts = [Prompt(row, "", None, toy_prompt()) for row in range(600)]
    sampling = SamplingConfig(temperature=1.3, max_new_tokens=2)
    measured = measure_acceptance_by_rank(target, CausalDrafter(drafter), sampling, prompts, 3)
    prefix = toy_prompt().prefix.tolist()
    choices = drafter.table[prefix].argsort(descending=True)
    expected = (target.table[prefix] / 1.3).softmax(dim=-1)[choices]
    assert measured == pytest.approx(expected.tolist(), abs=0.06)
    assert sum(measured) == pytest.approx(1.0)


def test_outputs_too_short_for_a_draft_are_refused():
    model = tiny_model("llama")
    target = CachedModel(model)
    prompt = Prompt(0, "", None, make_source([5], model))
    sampling = SamplingConfig(max_new_tokens=1)
    with pytest.raises(ValueError, match="no round drafted anything; give longer outputs"):
        measure_acceptance_by_rank(target, CausalDrafter(target), sampling, [prompt])
