"""Texts that are encoded together: each as its model's own encoder has it alone."""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.engine import encoding
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.encoding import TextEncoder
from drafttrain.decoding.engine.spec_drafter import read_drafter
from tests.comparing import close
from tests.decoding.engine.fresh import LENGTHS, sources_of
from tests.tiny_drafters import tiny_drafter
from tests.tiny_models import FAMILIES, tiny_model


@pytest.mark.parametrize("lengths", [LENGTHS, (5, 5), (90, 70)])
@pytest.mark.parametrize("family", [*FAMILIES, "mt5"])
def test_texts_of_a_batch_are_encoded_as_each_alone(family, lengths, monkeypatch):
    longer = {} if "t5" in family else {"max_position_embeddings": 128}
    model = tiny_model(family, **longer)
    target, sources = CachedModel(model), sources_of(model, lengths)
    shapes, run = [], encoding.run_stack
    monkeypatch.setattr(
        encoding, "run_stack", lambda *given: shapes.append(given[1].ids.shape) or run(*given)
    )
    states = target.encode_all(sources)
    assert shapes == [(len(lengths), max(lengths))]
    for state, source in zip(states, sources, strict=True):
        close(state.encoded, model.get_encoder()(input_ids=source.input_ids[None])[0][0])


@pytest.mark.parametrize("target", FAMILIES)
@torch.inference_mode()
def test_a_drafter_encodes_texts_of_a_batch_as_each_alone(target):
    model = tiny_drafter(target)
    sources = sources_of(tiny_model("bart"), LENGTHS)
    encode = TextEncoder(read_drafter(model)[0], model.config.pad_token_id)
    for found, source in zip(encode(sources), sources, strict=True):
        close(found, model.encode_source(source.input_ids[None])[0])
