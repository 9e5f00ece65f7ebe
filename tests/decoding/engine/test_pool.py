"""Caches of an engine: what they hold, and that memory given back comes again."""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.pool import release_caches
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch
from tests.tiny_models import tiny_model

PROMPTS = [[5, 6, 7, 8], [9, 3, 30], [12, 12, 20, 33, 4]]


@pytest.mark.parametrize("family", ["llama", "t5", "marian"])
def test_released_caches_grow_again_and_the_tokens_stay(family):
    model = CachedModel(tiny_model(family))
    sources = [make_source(ids, model.model) for ids in PROMPTS]

    def decode() -> list[list[int]]:
        decoder = Decoder(
            model, NoDrafter(), FixedLength(1), GreedyMatch(), Sampling(),
            lambda number: sequence_randomness(0, number, torch.device("cpu")),
        )  # fmt: skip
        return [output.tokens for output in decoder.decode_all(sources, 12, 3)]

    first, pool = decode(), model.engine.pool
    held = pool.states.numel()
    assert held > 0 and pool.in_use == 0
    release_caches()
    assert pool.states.numel() == pool.sources.numel() == 0
    assert decode() == first
    assert pool.states.numel() == held


def test_caches_in_use_are_kept():
    model = CachedModel(tiny_model("llama"))
    source = make_source(PROMPTS[0], model.model)
    state = model.encode(source)
    before = model.catch_up(state, source.prefix).logits
    held = model.engine.pool.states.numel()
    release_caches()
    assert model.engine.pool.states.numel() == held
    fresh = model.catch_up(model.encode(source), source.prefix).logits
    torch.testing.assert_close(before, fresh)
    more = torch.cat([source.prefix, torch.tensor([9])])
    after, whole = model.catch_up(state, more), model.catch_up(model.encode(source), more)
    torch.testing.assert_close(after.logits, whole.logits)
