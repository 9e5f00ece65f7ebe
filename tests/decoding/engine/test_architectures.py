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
    Llama4ForCausalLM,
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
from drafttrain.decoding.engine.probe import reference_logits
from drafttrain.decoding.types import Proposal
from tests.comparing import close
from tests.tiny_models import BART_SHAPE, CAUSAL_SHAPE, VOCAB, tiny_model, tiny_source

BOTH = {"full_attention": None, "sliding_attention": Window(4096)}


def str_of(value: PretrainedConfig | str | dict) -> str:
    return value.model_type if isinstance(value, PretrainedConfig) else str(value)


REFUSED = [(GPTNeoConfig(), "has local layers"), (Qwen3NextConfig(), "has linear_attention layers")]
REFUSED += [
    (kind(), "recurrent state") for kind in (MambaConfig, RwkvConfig, JambaConfig, FalconH1Config)
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=str_of)
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
            BOTH,
        ),
        (Gemma3TextConfig(sliding_window=512), BOTH | {"sliding_attention": Window(512)}),
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_models_that_answer_otherwise_after_a_single_token_are_detected(dtype):
    """GIT in Transformers 5.15 does so; plain decoding feeds one token per call."""
    model = tiny_model("llama").to(dtype)

    def flip(module, arguments, given, output):
        if given["input_ids"].shape[1] == 1:
            output.logits = output.logits.flip(-1)
        return output

    model.register_forward_hook(flip, with_kwargs=True)
    with pytest.raises(ValueError, match="'llama' model .* its logits with a cache differ"):
        CachedModel(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_of_other_lengths_may_round_otherwise_in_half_precision_only(dtype):
    """SmolLM2-135M, 30 layers, differs by 3 % (root mean square) in bfloat16 on a CPU."""
    model = tiny_model("llama").to(dtype)

    def round_otherwise(module, arguments, given, output):
        noise = torch.Generator().manual_seed(given["input_ids"].shape[1])
        noise = torch.randn(output.logits.shape, generator=noise).to(dtype)
        output.logits = output.logits + 0.03 * output.logits.std() * noise
        return output

    model.register_forward_hook(round_otherwise, with_kwargs=True)
    if dtype == torch.bfloat16:
        assert CachedModel(model).supports_tree_attention
    else:
        with pytest.raises(ValueError, match="its logits depend on later tokens"):
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


def test_a_temperature_of_later_positions_is_that_of_plain_decoding():
    """Llama 4 counts positions by the cache's length: trees and batches would scale by others."""
    shape = CAUSAL_SHAPE | {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2}
    shape |= {"intermediate_size_mlp": 32, "num_hidden_layers": 4, "attention_chunk_size": 8}
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**shape, floor_scale=10, attn_scale=2.0)).eval()
    target, prompt = CachedModel(model), torch.arange(4, 16)
    path = torch.cat([prompt, torch.tensor([9, 22, 31])])
    source = tiny_source(prompt, model)
    state = target.encode(source)
    target.score([(state, prompt, Proposal.chain(torch.tensor([5, 6])))])
    target.keep(state, torch.arange(0))
    [score] = target.score([(state, prompt, Proposal.chain(path[12:]))])
    close(score.logits, reference_logits(model, source, path)[-4:], 1e-5)
    with pytest.raises(ValueError, match="'llama4_text' .* draft trees: its attention temperature"):
        target.check_tree_attention()
