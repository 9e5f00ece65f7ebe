"""Agreement with the target: one pass in pieces, against a pass without a cache."""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation import quality
from drafttrain.evaluation.prompts import EvaluationOptions, Prompt
from drafttrain.evaluation.quality import target_agreement, token_probs
from tests.tiny_models import tiny_model

OUTPUT = [5, 9, 5, 11, 7]


@pytest.mark.parametrize("chunk", [1, 2, 64])
@pytest.mark.parametrize("family", ["marian", "llama"])
def test_each_token_has_its_probability_after_those_before_it(family, chunk, monkeypatch):
    monkeypatch.setattr(quality, "CHUNK", chunk)
    model = tiny_model(family)
    source = make_source([4, 6, 8], model)
    found = token_probs(CachedModel(model), source, OUTPUT, Sampling(temperature=0.7), 10)
    whole = torch.cat((source.prefix, torch.tensor(OUTPUT)))[None]
    inputs = {"input_ids": whole}
    if family == "marian":
        inputs = {"input_ids": source.input_ids[None], "decoder_input_ids": whole}
    with torch.no_grad():
        rows = model(**inputs).logits[0, len(source.prefix) - 1 : -1]
    for processed in model.generation_config.bad_words_ids or ():
        rows[:, processed[0]] = -torch.inf
    expected = (rows / 0.7).softmax(-1).gather(1, torch.tensor(OUTPUT)[:, None])[:, 0]
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_greedily_the_target_agrees_with_all_that_it_wrote_and_with_nothing_else(family):
    model = tiny_model(family)
    target, source = CachedModel(model), make_source([4, 6, 8], model)
    decoder = Decoder(
        target, NoDrafter(), FixedLength(1), GreedyMatch(), Sampling(),
        lambda _: SampledRandomness(torch.Generator()),
    )  # fmt: skip
    [output] = decoder.decode_all([source], 8)
    assert token_probs(target, source, output.tokens, Sampling(), 8).min() == 1.0
    changed = [*output.tokens[:-1], (output.tokens[-1] + 1) % 20]
    assert token_probs(target, source, changed, Sampling(), 8)[-1] == 0.0


def test_outputs_that_are_the_same_are_judged_once(monkeypatch):
    model = tiny_model("llama")
    target = CachedModel(model)
    sources = [make_source(ids, model) for ids in ([4, 6, 8], [9, 5])]
    prompts = [Prompt(row, "", None, source) for row, source in enumerate(sources)]
    asked = []

    def watched(model, source, tokens, *others):
        asked.append(tuple(tokens))
        return token_probs(model, source, tokens, *others)

    monkeypatch.setattr(quality, "token_probs", watched)
    known = {}

    def judged(first, second):
        outputs = [Output(tokens=first), Output(tokens=second)]
        options = EvaluationOptions(max_new_tokens=10, sampling=Sampling(1.0))
        found = target_agreement(target, prompts, outputs, options, known)
        return found.numerators.sum() / found.denominators.sum()

    same = judged([5, 9], [5, 9])
    assert asked == [(5, 9), (5, 9)]  # of two prompts
    assert judged([5, 9], [5, 9]) == same and len(asked) == 2
    other = judged([5, 9], [5, 11])
    assert asked[2:] == [(5, 11)] and other != same
