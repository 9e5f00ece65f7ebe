"""Which models can be decoded speculatively: those with a plain KV cache.

A model whose configuration has recurrent layers, or a state that cannot be rolled back, is refused.
Every other model is probed on a few tokens before anything is decoded with it (`probe.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
    WhisperForConditionalGeneration,
)

WHISPER_LIKE = (WhisperForConditionalGeneration,)
"""Encoder-decoder models with audio features as input (`input_features`). `generate` starts their
decoder from several tokens (`speech.py`)."""

MASKED_LAYERS = {"full_attention", "global", "sliding_attention", "chunked_attention"}
"""Layer types that differ only in their mask."""


def decoder_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the settings of a model's decoder."""
    return config.get_text_config(decoder=True).to_dict()


def check_configuration(
    config: PretrainedConfig, kind: type[PreTrainedModel] | None = None
) -> None:
    """Checks for a plain KV cache by the configuration, before weights are read.

    kind: the model's class; None: the causal language model of this configuration, if there is one.
    Raises ValueError naming the model type and the layers or settings that are not supported.
    """
    settings = decoder_settings(config)
    for name in ("num_state", "ngram"):
        if settings.get(name):
            refuse(config, f"its configuration sets {name}")
    layers = settings.get("layer_types") or settings.get("attention_layers") or ()
    unsupported = set(layers) - MASKED_LAYERS
    if unsupported:
        refuse(config, f"it has {', '.join(sorted(unsupported))} layers")
    if kind is None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if kind is not None and kind._is_stateful:  # state-space models, linear attention, hybrids
        refuse(config, "it keeps a recurrent state that cannot be rolled back")


@dataclass(frozen=True)
class Window:
    """An attention window of a layer."""

    size: int
    chunked: bool = False
    """True: tokens attend within chunks of this size. False: to the last `size` tokens."""

    def contains(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query at a position attends to a key at a position (broadcast; bool)."""
        if self.chunked:
            return query // self.size == key // self.size
        return query - key < self.size


def attention_windows(config: PretrainedConfig) -> dict[str, Window | None]:
    """Returns the window of each layer type; None: full attention."""
    settings = decoder_settings(config)
    size = settings.get("sliding_window")
    kinds = sorted(set(settings.get("layer_types") or ()))
    if not kinds:
        slides = size and settings.get("use_sliding_window", True)
        return {"full_attention": Window(size) if slides else None}
    windows: dict[str, Window | None] = dict.fromkeys(kinds)
    if "sliding_attention" in kinds:
        windows["sliding_attention"] = Window(size)
    if "chunked_attention" in kinds:
        windows["chunked_attention"] = Window(settings["attention_chunk_size"], chunked=True)
    return windows


def layer_masks(
    windows: Mapping[str, Window | None], mask: Tensor, queries: Tensor, keys: Tensor | None
) -> Tensor | dict[str, Tensor]:
    """Returns the mask for a model's `forward`: one with its window, or one per layer type.

    Shapes: additive mask [B, 1, N, C]; positions of queries [B, N] and of keys [B, C], which may be
    None if there is no window.
    """
    masks = {}
    for kind, window in windows.items():
        masks[kind] = mask
        if window is not None:
            assert keys is not None
            outside = ~window.contains(queries[:, :, None], keys[:, None, :])
            masks[kind] = mask.masked_fill(outside[:, None], torch.finfo(mask.dtype).min)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def unwrapped(model: Any) -> PreTrainedModel:
    """Returns the Transformers model inside a PeftModel or compiled module, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    base = getattr(inner, "get_base_model", None)
    return inner if base is None else base()


def encoder_width(model: Any) -> int:
    """Returns D of the encoder states [S, D]."""
    config = getattr(model.get_encoder(), "config", model.config)
    return config.get_text_config().hidden_size


def device_of(model: Any) -> torch.device:
    """Returns the device for a model's inputs; of an offloaded model, its execution device."""
    if torch.device(model.device).type != "meta":
        return model.device
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    return model.device


def check_states(config: PretrainedConfig) -> None:
    """Raises ValueError if a state drafter cannot use this target's layers.

    The target must be decoder-only, with rotary positions (the inputs of the drafter's layers are
    hidden states, not embedded tokens) and without attention windows.
    """
    settings = decoder_settings(config)
    plain = list(attention_windows(config).values()) == [None]
    if config.is_encoder_decoder or not settings.get("rope_parameters") or not plain:
        raise ValueError(
            f"a {config.model_type!r} model cannot have a state drafter: its layers have other "
            "than rotary positions, or attend to a window; use Llama, Mistral, Qwen2 or Qwen3, or "
            "a drafter that reads the text itself (recipes/train_causal_drafter.py)"
        )


def source_limit(config: PretrainedConfig) -> int | None:
    """Returns the maximal number of tokens of a source or prompt; None: no limit.

    The limit of an audio encoder counts its own positions (`max_source_positions`).
    """
    settings = config.to_dict() if config.is_encoder_decoder else {}
    for name in ("max_source_positions", "max_encoder_position_embeddings"):
        if name in settings:
            return settings[name]
    return position_limit(config)


def position_limit(config: PretrainedConfig) -> int | None:
    """Returns the number of decoder positions, prefix included; None: no limit."""
    if not config.is_encoder_decoder:
        config = config.get_text_config(decoder=True)
    settings = config.to_dict()
    general = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    names = ("max_target_positions", "max_decoder_position_embeddings", general)
    limit = next((settings[name] for name in names if name in settings), None)
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":  # longer inputs change frequencies
        return rope.get("original_max_position_embeddings", limit)
    return limit


def refuse(config: PretrainedConfig, reason: str) -> NoReturn:
    """Raises ValueError for a model that cannot be decoded speculatively."""
    raise ValueError(
        f"a {config.model_type!r} model cannot be decoded speculatively: {reason}; families with a "
        "plain KV cache work (T5, BART, Marian, Whisper, Llama, Qwen2, Qwen3, GPT-2, OPT, ...)"
    )
