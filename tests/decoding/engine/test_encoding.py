"""Texts encoded in a batch have the encoder states that each has alone."""

import pytest
import torch

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from tests.comparing import close
from tests.decoding.engine.fresh import LENGTHS, sources_of
from tests.tiny_drafters import tiny_drafter
from tests.tiny_families import any_family
from tests.tiny_models import FAMILIES, tiny_model, tiny_seq2seq


@pytest.mark.parametrize("lengths", [LENGTHS, (5, 5), (90, 70)])
@pytest.mark.parametrize("family", [*FAMILIES, "mt5"])
def test_texts_of_a_batch_are_encoded_as_single_texts(family, lengths):
    longer = {} if "t5" in family else {"max_position_embeddings": 128}
    model = any_family(family, **longer)
    target, sources = CachedModel(model), sources_of(model, lengths)
    shapes = []
    model.get_encoder().register_forward_hook(
        lambda _, given, named, output: shapes.append(named["input_ids"].shape), with_kwargs=True
    )
    states = target.encode_all(sources)
    assert shapes == [(len(lengths), max(lengths))]
    for state, source in zip(states, sources, strict=True):
        close(state.encoded, model.get_encoder()(input_ids=source.input_ids[None])[0][0])


@pytest.mark.parametrize("target", FAMILIES)
@torch.inference_mode()
def test_a_drafter_encodes_a_batch_as_single_texts(target):
    model = tiny_drafter(target)
    sources = sources_of(tiny_model("bart"), LENGTHS)
    states = BlockDrafter(model).encode_all(sources)
    for state, source in zip(states, sources, strict=True):
        close(state.encoded, model.get_encoder()(input_ids=source.input_ids[None])[0][0])


@torch.inference_mode()
def test_padding_beyond_a_window_of_the_encoder_reaches_no_other_text():
    model = tiny_seq2seq("t5gemma")
    sources = sources_of(model, (3, 9, 3))
    for state, source in zip(CachedModel(model).encode_all(sources), sources, strict=True):
        close(state.encoded, model.get_encoder()(input_ids=source.input_ids[None])[0][0])
