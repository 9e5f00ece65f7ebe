"""Shallow decoders that share an encoder: what they start from."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, WhisperForCausalLM

from drafttrain.models.shallow_decoder import shallow_config
from tests.tiny_models import tiny_model
from tests.tiny_speech import shallow


@pytest.mark.parametrize(("layers", "taken"), [(1, [3]), (2, [0, 3]), (3, [0, 2, 3])])
def test_layers_are_evenly_spaced_and_all_else_is_copied(layers, taken):
    target = tiny_model("whisper", decoder_layers=4)
    own, theirs = shallow(target, layers).state_dict(), target.state_dict()
    found = set()
    for name, value in own.items():
        source = name
        if name.startswith("model.decoder.layers."):
            _, _, _, layer, rest = name.split(".", 4)
            source = f"model.decoder.layers.{taken[int(layer)]}.{rest}"
            found.add(int(layer))
        assert torch.equal(value, theirs[source])
    assert found == set(range(layers)) and "proj_out.weight" in own


def test_the_configuration_of_the_target_stays_as_it_is():
    target = tiny_model("whisper", decoder_layers=4)
    config = shallow(target, 2).config
    assert target.config.is_encoder_decoder and target.config.decoder_layers == 4
    assert not config.is_encoder_decoder and config.decoder_layers == 2
    for name in ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"):
        assert getattr(config, name) == getattr(target.config, name)


def test_a_saved_one_is_loaded_as_a_causal_language_model(tmp_path):
    drafter = shallow(tiny_model("whisper"), 1)
    drafter.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert isinstance(loaded, WhisperForCausalLM) and not loaded.config.is_encoder_decoder
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_more_layers_than_the_target_has_are_refused():
    with pytest.raises(ValueError, match="3 decoder layers are more than the target's 2"):
        shallow_config(tiny_model("whisper").config, 3)
