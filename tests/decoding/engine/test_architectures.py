"""Models without a plain KV cache are refused by name, others are accepted."""

import pytest
import torch
from transformers import (
    FalconH1Config,
    FSMTConfig,
    FSMTForConditionalGeneration,
    Gemma3TextConfig,
    GPTNeoConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    RwkvConfig,
)

from drafttrain.decoding.engine.architectures import (
    Window,
    attention_windows,
    check_configuration,
    position_limit,
)
from drafttrain.decoding.engine.cached_model import CachedModel
from tests.tiny_models import BART_SHAPE, CAUSAL_SHAPE, VOCAB, tiny_model


def str_of(value: PretrainedConfig | str | dict) -> str:
    return value.model_type if isinstance(value, PretrainedConfig) else str(value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPTNeoConfig(), "has local layers"),
        (Qwen3NextConfig(), "has linear_attention layers"),
        (MambaConfig(), "recurrent state"),
        (RwkvConfig(), "recurrent state"),
        (JambaConfig(), "recurrent state"),
        (FalconH1Config(), "recurrent state"),
    ],
    ids=str_of,
)
def test_models_without_a_plain_cache_are_refused_from_their_configuration(config, reason):
    with pytest.raises(ValueError, match=f"'{config.model_type}' model .*{reason}"):
        check_configuration(config)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MistralConfig(), {"full_attention": Window(4096)}),
        (MistralConfig(sliding_window=None), {"full_attention": None}),
        (Qwen2Config(sliding_window=4096), {"full_attention": None}),  # not use_sliding_window
        (
            Qwen2Config(use_sliding_window=True, max_window_layers=1, num_hidden_layers=2),
            {"full_attention": None, "sliding_attention": Window(4096)},
        ),
        (
            Gemma3TextConfig(sliding_window=512),
            {"full_attention": None, "sliding_attention": Window(512)},
        ),
        (
            Llama4TextConfig(attention_chunk_size=64),
            {"full_attention": None, "chunked_attention": Window(64, chunked=True)},
        ),
        (LlamaConfig(), {"full_attention": None}),
    ],
    ids=str_of,
)
def test_windows_are_read_off_the_configuration(config, windows):
    check_configuration(config)
    assert attention_windows(config) == windows


def test_models_that_answer_otherwise_with_a_cache_are_detected():
    """FSMT is not causal without a cache, and uses only its last token with a cache."""
    shape = BART_SHAPE | {"decoder_start_token_id": 1, "langs": ["a", "b"]}
    shape |= {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    torch.manual_seed(0)
    model = FSMTForConditionalGeneration(FSMTConfig(**shape)).eval()
    with pytest.raises(ValueError, match="'fsmt' model .*: its logits depend"):
        CachedModel(model)


def test_models_that_answer_otherwise_after_a_single_token_are_detected():
    """GIT in Transformers 5.15 does so; plain decoding feeds one token per call."""
    model = tiny_model("llama")

    def flip(module, arguments, given, output):
        if given["input_ids"].shape[1] == 1:
            output.logits = output.logits.flip(-1)
        return output

    model.register_forward_hook(flip, with_kwargs=True)
    with pytest.raises(ValueError, match="'llama' model .* its logits with a cache differ"):
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
