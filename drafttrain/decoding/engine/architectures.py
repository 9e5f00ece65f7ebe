"""Which models decode speculatively: those that cache one state a token, and no others.

Families that are known are called in the cheapest way; the configuration tells where layers slide,
recur or keep a state that cannot be rolled back. Families that are not known are tried on a few
tokens before anything is decoded with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    BartForConditionalGeneration,
    EncoderDecoderCache,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MarianMTModel,
    MBartForConditionalGeneration,
    MistralForCausalLM,
    MT5ForConditionalGeneration,
    OPTForCausalLM,
    PegasusForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer

from drafttrain.decoding.types import Proposal, Source

if TYPE_CHECKING:
    from drafttrain.decoding.engine.cached_model import CachedModel
    from drafttrain.decoding.engine.sequence_state import SequenceState

BART_LIKE = (
    BartForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    PegasusForConditionalGeneration,
)
"""Logits are the output embeddings' product with the last hidden state, plus a bias."""

T5_LIKE = (T5ForConditionalGeneration, MT5ForConditionalGeneration)
"""Relative positions, counted by place in the cache."""

ROTARY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Decoder-only: embeddings, rotary layers, a norm and a plain output projection."""

PLAIN_CAUSAL = (*ROTARY, GPT2LMHeadModel, GPTNeoXForCausalLM, OPTForCausalLM)
"""Decoder-only: logits are the output embeddings' product with the last hidden state."""

KNOWN = (*BART_LIKE, *T5_LIKE, *PLAIN_CAUSAL)


def check_configuration(config: PretrainedConfig) -> None:
    """Refuse models without a plain KV cache, from their configuration, before weights are read.

    Raises ValueError naming the model type and what in it slides, recurs or keeps a state.
    """
    settings = config.get_text_config(decoder=True).to_dict()
    for name in ("attention_window", "num_state", "ngram"):
        if settings.get(name):
            _refuse(config, f"its configuration sets {name}")
    layers = settings.get("layer_types") or settings.get("attention_layers") or ()
    odd = set(layers) - {"full_attention", "global"}
    if odd:
        _refuse(config, f"it has {', '.join(sorted(odd))} layers")
    window = settings.get("sliding_window")
    # where there is a switch for the window, layer_types says which layers obey it
    if window and "use_sliding_window" not in settings:
        _refuse(config, f"its attention slides over {window} tokens (sliding_window)")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_stateless(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def check_known(config: PretrainedConfig) -> None:
    """Refuse families that cannot be given trees, from their configuration. Raises ValueError.

    How a family takes positions must be known: the nodes of a tree stand at their depth.
    """
    if not is_known(config):
        raise unknown_positions(config)


def is_known(config: PretrainedConfig) -> bool:
    """Whether this configuration is of a family in `KNOWN`."""
    if config.is_encoder_decoder:
        kinds = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    else:
        kinds = MODEL_FOR_CAUSAL_LM_MAPPING
    return type(config) in kinds and kinds[type(config)] in KNOWN


def check_projection(config: PretrainedConfig) -> None:
    """Refuse families whose output projection block heads could not use. Raises ValueError."""
    if not is_known(config):
        raise ValueError(
            f"a {config.model_type!r} model cannot have block heads: how it gets logits from its "
            "last hidden state is not known; use a family that is known (T5, BART, Marian, Llama, "
            "Qwen2, Qwen3, GPT-2, GPT-NeoX, OPT, ...), or another kind of drafter"
        )


def unknown_positions(config: PretrainedConfig) -> ValueError:
    """Why a model of this kind cannot be given trees, with the remedy."""
    return ValueError(
        f"a {config.model_type!r} model cannot be given a draft tree: how it takes positions is "
        "not known; draft chains, or use a family that is known (T5, BART, Marian, Llama, Qwen2, "
        "Qwen3, GPT-2, GPT-NeoX, OPT, ...)"
    )


def check_stateless(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Refuse linear attention, state spaces and mixtures of them. Raises ValueError."""
    if kind._is_stateful:
        _refuse(config, "it keeps a recurrent state that cannot be rolled back")


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse a loaded model that cannot be decoded with. Raises ValueError."""
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    check_configuration(model.config)
    check_stateless(type(model), model.config)


def position_limit(config: PretrainedConfig) -> int | None:
    """Most tokens that the encoder or the decoder can be fed; None = no limit."""
    if not config.is_encoder_decoder:
        config = config.get_text_config(decoder=True)
    settings = config.to_dict()
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    limit = settings.get(name)
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":  # beyond, its frequencies change and cached keys age
        return rope.get("original_max_position_embeddings", limit)
    return limit


def probe(target: CachedModel, source: Source, tokens: Tensor) -> None:
    """Draft, keep, draft again, and compare with one pass: a cache that is not plain differs.

    For families that are not known: some feed their last token only, look ahead, or number
    positions by the call. tokens [T] is a path from the source's prefix on. Raises ValueError.
    """
    model = target.model
    length = len(source.prefix)
    state = target.encode(source)
    target.score([state], [tokens[:length]], [Proposal.chain(tokens[-3:])])
    target.keep(state, torch.arange(0))
    target.score([state], [tokens[: length + 1]], [Proposal.chain(tokens[length + 1 : length + 4])])
    target.keep(state, torch.arange(1))
    start = length + 3
    [cached] = target.score([state], [tokens[:start]], [Proposal.chain(tokens[start:])])
    _check_plain(model, state, len(tokens))
    fresh_state = target.encode(source)
    [fresh] = target.score([fresh_state], [tokens[:length]], [Proposal.chain(tokens[length:])])
    seen, expected = cached.logits, fresh.logits[start - length :]
    if seen.shape != expected.shape or not _close(seen, expected):
        _refuse(model.config, "with its cache it gives other logits than without")
    [early] = target.score([target.encode(source)], [tokens[:length]], [Proposal.empty()])
    if not _close(early.logits, fresh.logits[:1]):
        _refuse(model.config, "its rows depend on tokens that come after them")


def _close(seen: Tensor, expected: Tensor) -> bool:
    seen, expected = seen.float(), expected.float()
    return torch.allclose(seen, expected, rtol=0.02, atol=0.02 * float(expected.std()))


def _check_plain(model: PreTrainedModel, state: SequenceState, length: int) -> None:
    """The cache must hold every fed token and the cross-attention's own part, nothing else."""
    parts = [("self-attention", state.cache, length)]
    if isinstance(state.cache, EncoderDecoderCache):
        parts = [
            ("self-attention", state.cache.self_attention_cache, length),
            (
                "cross-attention",
                state.cache.cross_attention_cache,
                state.encoder_outputs[0].shape[1],
            ),
        ]
    for name, cache, wanted in parts:
        for layer in cache.layers or [None]:
            if type(layer) is not DynamicLayer or layer.get_seq_length() != wanted:
                _refuse(model.config, f"its {name} cache does not hold one state a token")


def _refuse(config: PretrainedConfig, reason: str) -> None:
    raise ValueError(
        f"a {config.model_type!r} model cannot be decoded speculatively: {reason}; families with a "
        "plain KV cache work (T5, BART, Marian, Llama, Qwen2, Qwen3, GPT-2, GPT-NeoX, OPT, ...)"
    )
