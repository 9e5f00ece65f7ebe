"""Spec-Drafters that read the target's encoder states: their computation, and in the loop."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import DrafterConfig
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.spec_drafter import RowReader
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.types import Output, Source
from drafttrain.models.drafters import check_fit
from drafttrain.models.spec_drafter.build import make_config
from drafttrain.models.spec_drafter.layout import PREFIX, Rows
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.pooling import group_means
from drafttrain.models.spec_drafter.shape import shape_of
from tests.decoding.decoded import decoder_of, sources_for
from tests.decoding.engine.fresh import cross_keys_values
from tests.tiny_drafters import shared, tiny_drafter, with_noise
from tests.tiny_models import VOCAB, near_copy, tiny_model, tiny_source

FAMILIES = ("marian", "t5", "whisper")
NEW = 16


def drafter_of(family: str, noise: float = 0.02, **settings: object) -> SpecDrafter:
    """Returns a drafter as deep as its target that is right on some tokens."""
    given = {"encoder": "target", "decoder_layers": 2}
    return with_noise(tiny_drafter(family, **given | settings), noise)


def target_of(family: str) -> CachedModel:
    target = CachedModel(shared(family))
    target.model.generation_config.min_new_tokens = 8
    return target


def decode(
    target: CachedModel, drafter: Drafter, sources: list[Source], batch_size: int = 1
) -> list[Output]:
    return decoder_of(target, drafter).decode_all(sources, NEW, batch_size)


def encoded(model: PreTrainedModel, source: Source) -> torch.Tensor:
    with torch.inference_mode():
        return model.get_encoder()(*(value[None] for value in source.inputs.values()))[0][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_of_equal_depth_equals_its_target(family):
    target, drafter = shared(family), drafter_of(family, noise=0.0)
    source, tokens = tiny_source([5, 9, 20, 7, 1], target), torch.randint(4, VOCAB, (1, 6))
    states = encoded(target, source)[None]
    positions = torch.arange(6)[None]
    rows = Rows(tokens, positions, torch.full_like(tokens, PREFIX), positions)
    read = RowReader(drafter)
    with torch.no_grad():
        inputs = {name: value[None] for name, value in source.inputs.items()}
        expected = target(**inputs, decoder_input_ids=tokens).logits
        found = drafter.logits(read(rows, read.encode(states, None)).hidden)
    assert (found - expected).abs().max() < (1e-5 if family == "t5" else 1e-12)


@pytest.mark.parametrize("pooling", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_of_cross_attention_are_the_targets(family, pooling):
    """Copied layers start with the target's keys and values; with pooling these are means."""
    settings = {"decoder_layers": 1, "source_pooling": pooling, "noise": 0.0}
    target, drafter = target_of(family), BlockDrafter(drafter_of(family, **settings))
    source = sources_for(target.model)[0]
    state = target.encode(source)
    target.extend_cache(state, state.source.prefix)
    [made] = drafter.encode_all([replace(state.source, encoded=state.encoded)])
    drafter.cached.extend_cache(made, state.source.prefix)
    ours, theirs = cross_keys_values(made, 0), cross_keys_values(state, 1)
    for own, of_target in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, group_means(of_target, pooling)[0], rtol=1e-10, atol=1e-10)


def test_a_clip_is_encoded_once_for_target_and_drafter():
    target, shapes = target_of("whisper"), []
    sources = sources_for(target.model)
    hook = target.model.get_encoder().register_forward_hook(
        lambda *call: shapes.append(call[2][0].shape)
    )
    decode(target, BlockDrafter(drafter_of("whisper")), sources, 2)
    hook.remove()
    assert sum(shape[0] for shape in shapes) == len(sources)


def test_a_drafter_with_its_own_encoder_uses_it_next_to_one_that_shares():
    target, model = target_of("whisper"), near_copy(shared("whisper"), 0.05, seed=1)
    own, sources = CausalDrafter(CachedModel(model)), sources_for(target.model)
    expected, calls = decode(target, own, sources), []
    model.get_encoder().register_forward_hook(lambda *call: calls.append(call))
    levels = [Level("own", own), Level("slots", BlockDrafter(drafter_of("whisper")))]
    found = decode(target, cascade(levels, [[2, 0], [1]], 1.0), sources)
    assert calls and [one.tokens for one in found] == [one.tokens for one in expected]
    first = [[one.rounds[0].drafted[0] for one in outputs] for outputs in (found, expected)]
    assert first[0] == first[1]


def test_a_source_that_no_target_has_read_is_refused():
    drafter = BlockDrafter(drafter_of("marian"))
    source = sources_for(shared("marian"))[0]
    with pytest.raises(AssertionError, match="not encoded"):
        drafter.encode_all([source])


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("whisper", {"encoder": "own"}, "drafter.encoder = 'own', but the inputs .* are audio"),
        ("bart", {"encoder": "target", "encoder_layers": 2}, "drafter.encoder_layers = 2 is for"),
        ("bart", {"source_pooling": 2}, "drafter.source_pooling = 2 averages"),
    ],
)
def test_encoders_that_cannot_be_are_refused(family, settings, words):
    with pytest.raises(ConfigError, match=words):
        make_config(tiny_model(family).config, DrafterConfig(**settings), None)


def test_audio_is_read_by_the_targets_encoder_and_texts_by_the_drafters_own():
    for family, expected in (("whisper", "target"), ("bart", "own")):
        config = make_config(tiny_model(family).config, DrafterConfig(), None)
        assert shape_of(config).encoder == expected


def test_an_encoder_of_another_width_is_refused():
    drafter = drafter_of("bart").config
    drafter.d_model = 99
    with pytest.raises(ConfigError, match="encoder states of size 99"):
        check_fit(drafter, shared("bart").config, "drafter 'd'", "target 't'")
