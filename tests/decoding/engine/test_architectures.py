"""Models without a plain KV cache are refused by name, those with one are not."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    FalconH1Config,
    FSMTConfig,
    FSMTForConditionalGeneration,
    Gemma3TextConfig,
    GPTNeoConfig,
    JambaConfig,
    LEDConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    RwkvConfig,
)

from drafttrain.decoding.engine.architectures import check_configuration, position_limit
from drafttrain.decoding.engine.cached_model import CachedModel
from tests.tiny_models import BART_SHAPE, CAUSAL_SHAPE, VOCAB, tiny_model


def str_of(value: PretrainedConfig | str) -> str:
    return value if isinstance(value, str) else value.model_type


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(), "slides over 4096 tokens"),
        (Phi3Config(sliding_window=2047), "slides over 2047 tokens"),
        (Qwen2Config(use_sliding_window=True), "has sliding_attention layers"),
        (Gemma3TextConfig(), "has sliding_attention layers"),
        (Llama4TextConfig(), "has chunked_attention layers"),
        (GPTNeoConfig(), "has local layers"),
        (Qwen3NextConfig(), "has linear_attention layers"),
        (MambaConfig(), "recurrent state"),
        (RwkvConfig(), "recurrent state"),
        (JambaConfig(), "recurrent state"),
        (FalconH1Config(), "recurrent state"),
        (LEDConfig(), "sets attention_window"),
    ],
    ids=str_of,
)
def test_models_without_a_plain_cache_are_refused_from_their_configuration(config, reason):
    with pytest.raises(ValueError, match=f"'{config.model_type}' model .*{reason}"):
        check_configuration(config)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(sliding_window=None),
        Qwen2Config(sliding_window=4096),  # with use_sliding_window = False
        Qwen2Config(use_sliding_window=True, max_window_layers=99),  # no layer obeys it
        Qwen3Config(),
        Phi3Config(),
        LlamaConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_window_that_no_layer_obeys_does_no_harm(config):
    check_configuration(config)


def test_a_loaded_model_that_slides_is_refused_too():
    shape = CAUSAL_SHAPE | {"num_key_value_heads": 2, "sliding_window": 8}
    with pytest.raises(ValueError, match="'mistral' model .* slides over 8"):
        CachedModel(MistralForCausalLM(MistralConfig(**shape)).eval())


def test_models_that_answer_otherwise_with_a_cache_are_found_out():
    """FSMT feeds only its last token when it has a cache: it would judge drafts by wrong rows."""
    shape = BART_SHAPE | {"decoder_start_token_id": 1, "langs": ["a", "b"]}
    shape |= {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    torch.manual_seed(0)
    model = FSMTForConditionalGeneration(FSMTConfig(**shape)).eval()
    with pytest.raises(ValueError, match="'fsmt' model .* other logits than without"):
        CachedModel(model)


def test_models_that_look_ahead_are_found_out():
    """BERT's language model attends in both directions unless it is told that it is a decoder."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"vocab_size": VOCAB, "intermediate_size": 32, "max_position_embeddings": 64}
    shape |= {"initializer_range": 0.5}
    torch.manual_seed(0)
    model = BertLMHeadModel(BertConfig(**shape)).eval()
    with pytest.raises(ValueError, match="'bert' model cannot be decoded speculatively"):
        CachedModel(model)


def test_a_model_in_training_mode_is_refused():
    for family in ("marian", "llama"):
        with pytest.raises(ValueError, match="model.eval"):
            CachedModel(tiny_model(family).train())


def test_positions_end_before_the_rotations_change_with_the_length():
    long = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    long |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
    config = LlamaConfig(**CAUSAL_SHAPE, rope_parameters=long)
    assert position_limit(config) == 32
    assert position_limit(LlamaConfig(**CAUSAL_SHAPE)) == 64
