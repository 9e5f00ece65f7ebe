"""Which models decode speculatively: those that cache one state a token, and no others.

Families that are known are called in the cheapest way; the configuration tells where layers slide,
recur or keep a state that cannot be rolled back. Families that are not known are tried on a few
tokens before anything is decoded with them.
"""

from __future__ import annotations

from typing import NoReturn

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    BartForConditionalGeneration,
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
    WhisperForConditionalGeneration,
)

BART_LIKE = (
    BartForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    PegasusForConditionalGeneration,
)
"""Logits are the output embeddings' product with the last hidden state, plus a bias."""

WHISPER_LIKE = (WhisperForConditionalGeneration,)
"""Encoder-decoder models that read features of audio: `input_features`. `generate` starts their
decoder from several tokens (`speech.py`)."""

T5_LIKE = (T5ForConditionalGeneration, MT5ForConditionalGeneration)
"""Relative positions, counted by place in the cache."""

ROTARY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Decoder-only: embeddings, rotary layers, a norm and a plain output projection."""

PLAIN_CAUSAL = (*ROTARY, GPT2LMHeadModel, GPTNeoXForCausalLM, OPTForCausalLM)
"""Decoder-only: logits are the output embeddings' product with the last hidden state."""

KNOWN = (*BART_LIKE, *WHISPER_LIKE, *T5_LIKE, *PLAIN_CAUSAL)


FAMILIES = "T5, BART, Marian, Llama, Qwen2, Qwen3, GPT-2, GPT-NeoX, OPT, ..."
"""Those in `KNOWN`, in messages."""


def counts_last_token(model: PreTrainedModel) -> bool:
    """Whether `generate` of this family leaves a position for the last token, which is not fed."""
    return isinstance(model, WHISPER_LIKE)


def check_configuration(config: PretrainedConfig) -> None:
    """Refuse models without a plain KV cache, from their configuration, before weights are read.

    Raises ValueError naming the model type and what in it slides, recurs or keeps a state.
    """
    settings = config.get_text_config(decoder=True).to_dict()
    for name in ("attention_window", "num_state", "ngram"):
        if settings.get(name):
            refuse(config, f"its configuration sets {name}")
    layers = settings.get("layer_types") or settings.get("attention_layers") or ()
    odd = set(layers) - {"full_attention", "global"}
    if odd:
        refuse(config, f"it has {', '.join(sorted(odd))} layers")
    window = settings.get("sliding_window")
    # where there is a switch for the window, layer_types says which layers obey it
    if window and "use_sliding_window" not in settings:
        refuse(config, f"its attention slides over {window} tokens (sliding_window)")
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
    mappings = [MODEL_FOR_CAUSAL_LM_MAPPING]
    if config.is_encoder_decoder:
        mappings = [MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING]
    return any(type(config) in kinds and kinds[type(config)] in KNOWN for kinds in mappings)


def check_masks(config: PretrainedConfig) -> None:
    """Refuse families that cannot be trained on many blocks of a text at once. Raises ValueError.

    How a family takes positions must be known: each block has its own behind its prefix.
    """
    if not is_known(config):
        raise ValueError(
            f"a {config.model_type!r} model cannot learn to draft blocks: how it takes positions "
            f"is not known; start from a family that is known ({FAMILIES}), or train one that "
            "drafts token by token (recipes/train_causal_drafter.py)"
        )


def check_prompts(config: PretrainedConfig) -> None:
    """Refuse families whose keys and values of a prompt drafters cannot take, or whose models
    cannot go on behind those of their target. Raises ValueError.

    How a family keeps them must be known.
    """
    if config.is_encoder_decoder or not is_known(config):
        raise ValueError(
            f"a {config.model_type!r} model has no prompt that a drafter and its target could "
            "share: how it keeps keys and values of prompts is not known; use decoder-only models "
            f"of a family that is known ({FAMILIES}), or drafters that read the prompt themselves "
            "(drafter.prompt=own)"
        )


def check_states(config: PretrainedConfig) -> None:
    """Refuse families behind whose states no drafter can go on. Raises ValueError.

    Positions must be rotary: what a state drafter feeds its layers is no embedded token.
    """
    kind = type(config)
    found = MODEL_FOR_CAUSAL_LM_MAPPING[kind] if kind in MODEL_FOR_CAUSAL_LM_MAPPING else None
    if config.is_encoder_decoder or found not in ROTARY:
        raise ValueError(
            f"a {config.model_type!r} model cannot have a drafter behind its states: its layers "
            "are not known to take positions by rotation alone; use Llama, Mistral, Qwen2 or "
            "Qwen3, or a drafter that reads texts itself (recipes/train_parallel_drafter.py)"
        )


def check_projection(config: PretrainedConfig) -> None:
    """Refuse families whose output projection block heads could not use. Raises ValueError."""
    if not is_known(config):
        raise ValueError(
            f"a {config.model_type!r} model cannot have block heads: how it gets logits from its "
            f"last hidden state is not known; use a family that is known ({FAMILIES}), or another "
            "kind of drafter"
        )


def unknown_positions(config: PretrainedConfig) -> ValueError:
    """Why a model of this kind cannot be given trees, with the remedy."""
    return ValueError(
        f"a {config.model_type!r} model cannot be given a draft tree: how it takes positions is "
        f"not known; draft chains, or use a family that is known ({FAMILIES})"
    )


def check_stateless(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Refuse linear attention, state spaces and mixtures of them. Raises ValueError."""
    if kind._is_stateful:
        refuse(config, "it keeps a recurrent state that cannot be rolled back")


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse a loaded model that cannot be decoded with. Raises ValueError."""
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    check_configuration(model.config)
    check_stateless(type(model), model.config)


def source_limit(config: PretrainedConfig) -> int | None:
    """Most tokens of a source, or of a decoder-only model's prompt; None = no limit.

    Encoders that read features have lengths of their own (`max_source_positions`).
    """
    settings = config.to_dict()
    if config.is_encoder_decoder and "max_source_positions" in settings:
        return settings["max_source_positions"]
    return position_limit(config)


def position_limit(config: PretrainedConfig) -> int | None:
    """Most tokens that the decoder can be fed, its prefix included; None = no limit."""
    if not config.is_encoder_decoder:
        config = config.get_text_config(decoder=True)
    settings = config.to_dict()
    if "max_target_positions" in settings:
        return settings["max_target_positions"]
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    limit = settings.get(name)
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":  # beyond, its frequencies change and cached keys age
        return rope.get("original_max_position_embeddings", limit)
    return limit


def refuse(config: PretrainedConfig, reason: str) -> NoReturn:
    """Raise ValueError for a model that cannot be decoded speculatively."""
    raise ValueError(
        f"a {config.model_type!r} model cannot be decoded speculatively: {reason}; families with a "
        "plain KV cache work (T5, BART, Marian, Whisper, Llama, Qwen2, Qwen3, GPT-2, OPT, ...)"
    )
