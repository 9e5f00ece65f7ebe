"""Which models can be decoded speculatively: those with a plain KV cache.

A model whose configuration has recurrent layers, or a state that cannot be rolled back, is refused.
Every other model is probed on a few tokens before anything is decoded with it (`probe.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    LEDForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    WhisperForConditionalGeneration,
)

WHISPER_LIKE = (WhisperForConditionalGeneration,)
"""Encoder-decoder models with audio features as input (`input_features`). `generate` starts their
decoder from several tokens (`speech.py`)."""

DROPS_MASKS = (LEDForConditionalGeneration,)
"""Models whose decoder drops the mask of a single token and does not expand the source's mask."""

MASKED_LAYERS = {"full_attention", "global", "sliding_attention", "chunked_attention"}
"""Layer types that differ only in their mask."""


def check_configuration(config: PretrainedConfig) -> None:
    """Checks for a plain KV cache by the configuration, before weights are read.

    Raises ValueError naming the model type and the layers or settings that are not supported.
    """
    settings = config.get_text_config(decoder=True).to_dict()
    for name in ("num_state", "ngram"):
        if settings.get(name):
            refuse(config, f"its configuration sets {name}")
    layers = settings.get("layer_types") or settings.get("attention_layers") or ()
    unsupported = set(layers) - MASKED_LAYERS
    if unsupported:
        refuse(config, f"it has {', '.join(sorted(unsupported))} layers")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_stateless(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


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
    settings = config.get_text_config(decoder=True).to_dict()
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
    settings = config.get_text_config(decoder=True).to_dict()
    plain = list(attention_windows(config).values()) == [None]
    if config.is_encoder_decoder or not settings.get("rope_parameters") or not plain:
        raise ValueError(
            f"a {config.model_type!r} model cannot have a state drafter: its layers have other "
            "than rotary positions, or attend to a window; use Llama, Mistral, Qwen2 or Qwen3, or "
            "a drafter that reads the text itself (recipes/train_causal_drafter.py)"
        )


def check_stateless(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raises ValueError for linear attention, state-space models and hybrids of them."""
    if kind._is_stateful:
        refuse(config, "it keeps a recurrent state that cannot be rolled back")


def check_architecture(model: PreTrainedModel) -> None:
    """Raises ValueError for a loaded model that cannot be decoded speculatively."""
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    check_configuration(model.config)
    check_stateless(type(unwrapped(model)), model.config)


def source_limit(config: PretrainedConfig) -> int | None:
    """Returns the maximal number of tokens of a source or prompt; None: no limit.

    The limit of an audio encoder counts its own positions (`max_source_positions`).
    """
    settings = config.to_dict()
    for name in ("max_source_positions", "max_encoder_position_embeddings"):
        if config.is_encoder_decoder and name in settings:
            return settings[name]
    return position_limit(config)


def position_limit(config: PretrainedConfig) -> int | None:
    """Returns the number of decoder positions, prefix included; None: no limit."""
    if not config.is_encoder_decoder:
        config = config.get_text_config(decoder=True)
    settings = config.to_dict()
    for name in ("max_target_positions", "max_decoder_position_embeddings"):
        if name in settings:
            return settings[name]
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    limit = settings.get(name)
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":  # longer inputs change frequencies
        return rope.get("original_max_position_embeddings", limit)
    return limit


def tree_fault(config: PretrainedConfig) -> str | None:
    """Returns why trees and batches do not work, if only long inputs would show it; else None.

    Llama 4 scales attention by position, which it counts by the cache's length, from `floor_scale`
    on.
    """
    if config.get_text_config(decoder=True).to_dict().get("attn_temperature_tuning"):
        return "its attention temperature counts cached tokens (attn_temperature_tuning)"
    return None


def refuse(config: PretrainedConfig, reason: str) -> NoReturn:
    """Raises ValueError for a model that cannot be decoded speculatively."""
    raise ValueError(
        f"a {config.model_type!r} model cannot be decoded speculatively: {reason}; families with a "
        "plain KV cache work (T5, BART, Marian, Whisper, Llama, Qwen2, Qwen3, GPT-2, OPT, ...)"
    )
