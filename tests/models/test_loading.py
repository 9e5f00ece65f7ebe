"""Targets load, or say in one sentence what to change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.models.loading import (
    cache_for_generate,
    cache_is_deep_enough,
    check_seq2seq,
    check_target,
    choose_device,
    load_processor,
    load_target,
)
from tests.tiny_models import EOS, tiny_model
from tests.tiny_targets import save_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_target(tiny_model("marian"), tmp_path)


def config(path: Path | str, **settings) -> TargetConfig:
    return TargetConfig(path=str(path), device="cpu", **settings)


def test_a_saved_model_loads_with_its_tokenizer_in_eval_mode(folder):
    target = load_target(config(folder))
    assert target.tokenizer("w5 w6")["input_ids"] == [5, 6, EOS]
    assert (target.model.training, target.model.dtype) == (False, torch.float32)
    assert target.path == str(folder)
    assert load_target(config(folder, dtype="bfloat16")).model.dtype == torch.bfloat16


def test_a_decoder_only_model_loads_as_one(tmp_path):
    target = load_target(config(save_target(tiny_model("llama"), tmp_path), dtype="float32"))
    assert type(target.model) is LlamaForCausalLM
    assert (target.model.training, target.model.dtype) == (False, torch.float32)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "a/b/c"])
def test_a_missing_folder_is_named_without_asking_the_network(path):
    with pytest.raises(ConfigError, match=f"target.path = '{path}': no such folder"):
        load_target(config(path))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no config.json"):
        load_target(config(tmp_path))


@pytest.mark.parametrize(
    ("check", "kind", "words"),
    [
        (check_seq2seq, "gpt2", "'gpt2' model, not an encoder"),
        (check_seq2seq, "bert", "'bert' model, not an encoder"),
        (check_seq2seq, "nothing-known", "no model configuration"),
        (check_target, "vit", "'vit' model, not a language model"),
        (check_target, "clip", "'clip' model, not a language model"),
    ],
)
def test_other_models_are_refused_from_their_configuration(tmp_path, check, kind, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match=words):
        check(config(tmp_path))


def test_a_missing_tokenizer_is_named_before_weights_are_read(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        load_target(config(folder))


def test_devices_that_are_not_there_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="'gpu' is no device"):
        choose_device("gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="0 usable CUDA devices"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="target.device = 'cuda:1'"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")


def test_a_processor_is_loaded_where_inputs_are_no_token_ids(folder):
    config = TargetConfig(path=str(folder))
    assert load_target(config).processor is None
    shape = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "vocab_size": 40}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
    listening = WhisperForConditionalGeneration(WhisperConfig(**shape, **heads, **ends))
    with pytest.raises(ConfigError, match="its processor, which makes features of audio"):
        load_processor(config, listening.config)
    tokenizer = WhisperTokenizer(vocab={"<|endoftext|>": 0, "a": 1}, merges=[])
    speech = WhisperProcessor(WhisperFeatureExtractor(feature_size=8), tokenizer)
    listening.save_pretrained(folder)
    speech.save_pretrained(folder)
    processor = load_processor(config, listening.config)
    features = processor(np.zeros(1600), sampling_rate=16000, return_tensors="pt")
    assert features["input_features"].shape[1] == 8


@pytest.mark.parametrize("decoder_layers", [1, 2, 3])
def test_generate_needs_a_cache_of_ours_exactly_where_its_own_is_not_deep_enough(decoder_layers):
    model = tiny_model("t5", num_decoder_layers=decoder_layers)
    ids = torch.tensor([[5, 9, 1]])
    how = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert cache_is_deep_enough(model.config) == (decoder_layers < 3)
    if cache_is_deep_enough(model.config):
        assert model.generate(ids, **how).shape[1] > 1
    else:
        with pytest.raises(IndexError):
            model.generate(ids, **how)
    assert model.generate(ids, **how, **cache_for_generate(model)).shape[1] > 1
    assert cache_is_deep_enough(tiny_model("llama").config)
