"""Converted models decode as the models they were made of; what cannot be converted is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BartConfig, MT5Config, MT5ForConditionalGeneration, UMT5Config

from drafttrain.config.base import ConfigError
from drafttrain.decoding.ctranslate2.settings import placement, translation
from drafttrain.decoding.ctranslate2.translate import load_translator, translate
from drafttrain.models.ctranslate2 import check_convertible, check_installed, convert
from tests.tiny_models import EOS, FAMILIES, PAD, T5_SHAPE, tiny_model

pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed (it is in the dev extra)")

SOURCES = [[4 + (i * 13 + j * 7) % 36 for j in range(i % 6)] + [EOS] for i in range(12)]
GREEDY = {"do_sample": False, "num_beams": 1, "max_new_tokens": 16, "max_length": None}


def converted(model, folder: Path) -> list[list[int]]:
    convert(model, folder)
    return translate(load_translator(folder, placement(model)), SOURCES, translation(model, 16))


def generated(model) -> list[list[int]]:
    sources = [torch.tensor([source]) for source in SOURCES]
    outputs = [model.generate(source, **GREEDY)[0, 1:].tolist() for source in sources]
    return [tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens for tokens in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_decodes_as_generate_does(family, tmp_path):
    model = tiny_model(family)
    expected = generated(model)
    assert len(set(map(tuple, expected))) > len(SOURCES) / 2
    assert converted(model, tmp_path) == expected


UNUSUAL = {
    "a deeper encoder with more heads": (
        "marian",
        {"encoder_layers": 3, "encoder_attention_heads": 4, "decoder_layers": 1},
    ),
    "another activation": ("bart", {"activation_function": "gelu_new"}),
    "a vocabulary on each side": (
        "marian",
        {"vocab_size": 44, "decoder_vocab_size": 40, "share_encoder_decoder_embeddings": False},
    ),
    "heads narrower than the model": ("t5", {"d_kv": 4}),
    "a deeper T5 decoder": ("t5", {"num_decoder_layers": 3}),
    "another epsilon": ("t5", {"layer_norm_epsilon": 0.1}),
    "tied embeddings": ("bart", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_the_configuration_changes_is_converted(case, tmp_path):
    family, changes = UNUSUAL[case]
    model = tiny_model(family, **changes)
    if case == "a deeper T5 decoder":  # generate makes its cache as deep as the encoder
        from drafttrain.data.distill.generation import generate_batch

        expected = generate_batch(model, SOURCES, GREEDY | {"num_beams": 1})
    else:
        expected = generated(model)
    assert converted(model, tmp_path) == expected


def test_mt5_is_converted(tmp_path):
    torch.manual_seed(3)
    settings = T5_SHAPE | {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False}
    model = MT5ForConditionalGeneration(MT5Config(**settings)).eval()
    model.lm_head.weight.data.normal_()
    assert converted(model, tmp_path) == generated(model)


def test_conversion_leaves_the_model_as_it_was(tmp_path):
    model = tiny_model("marian")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    settings = model.config.to_dict()
    convert(model, tmp_path)
    assert model.config.to_dict() == settings
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_half_precision_model_is_written_in_float32(tmp_path):
    model = tiny_model("marian").to(torch.bfloat16)
    convert(model, tmp_path)
    model = model.float()
    found = translate(load_translator(tmp_path, placement(model)), SOURCES, translation(model, 16))
    assert found == generated(model)


@pytest.mark.parametrize(
    "config", [UMT5Config(), BartConfig(activation_function="tanh")], ids=["family", "activation"]
)
def test_what_cannot_be_converted_is_refused_by_name(config):
    with pytest.raises(ConfigError, match="umt5|tanh") as refusal:
        check_convertible(config, "backend = 'ctranslate2'")
    assert str(refusal.value).startswith("backend = 'ctranslate2', but ")
    assert "leave ctranslate2 out" in str(refusal.value)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr("drafttrain.models.ctranslate2.PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="backend needs .*`pip install no_such_package`"):
        check_installed("backend")


def test_padding_that_starts_the_decoder_is_a_token_like_others(tmp_path):
    """Its embedding is looked up: no family starts from zeros here."""
    model = tiny_model("marian")
    assert model.generation_config.decoder_start_token_id == PAD
    before = converted(model, tmp_path)
    model.get_decoder().embed_tokens.weight.data[PAD] += 3.0
    after = converted(model, tmp_path)
    assert after == generated(model) != before
