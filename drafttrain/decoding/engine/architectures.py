"""Which models decode speculatively: those that cache one state per token, and no others.

The configuration says where layers recur or keep a state that cannot be rolled back. Every model is
then tried on a few tokens before anything is decoded with it (`probe.py`).
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
"""Encoder-decoder models that read features of audio: `input_features`. `generate` starts their
decoder from several tokens (`speech.py`)."""

UNMASKED_ALONE = (LEDForConditionalGeneration,)
"""Models whose decoder drops the mask of a single token, and expands no mask of the source."""

MASKED_LAYERS = {"full_attention", "global", "sliding_attention", "chunked_attention"}
"""Kinds of layers that differ in their mask alone."""


def counts_last_token(model: PreTrainedModel) -> bool:
    """Whether `generate` of this family leaves a position for the last token, which is not fed."""
    return isinstance(model, WHISPER_LIKE)


def check_configuration(config: PretrainedConfig) -> None:
    """Refuse models without a plain KV cache, from their configuration, before weights are read.

    Raises ValueError naming the model type and what in it slides, recurs or keeps a state.
    """
    settings = config.get_text_config(decoder=True).to_dict()
    for name in ("num_state", "ngram"):
        if settings.get(name):
            refuse(config, f"its configuration sets {name}")
    layers = settings.get("layer_types") or settings.get("attention_layers") or ()
    odd = set(layers) - MASKED_LAYERS
    if odd:
        refuse(config, f"it has {', '.join(sorted(odd))} layers")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_stateless(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@dataclass(frozen=True)
class Window:
    """Which keys a layer sees of those before a token."""

    size: int
    chunked: bool = False
    """Whether the text is cut into chunks of this size; else the last `size` tokens are seen."""

    def holds(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether keys at these positions are seen from these."""
        if self.chunked:
            return query // self.size == key // self.size
        return query - key < self.size


def attention_windows(config: PretrainedConfig) -> dict[str, Window | None]:
    """The window of each kind of layer; None: the whole text."""
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
    """A mask as a model's `forward` takes it: with its window, or one for each kind of layer of
    `attention_windows`.

    Shapes: mask, added to attention scores, [B, 1, N, C]; positions: queries [B, N], keys [B, C],
    None where there is no window.
    """
    masks = {}
    for kind, window in windows.items():
        masks[kind] = mask
        if window is not None:
            assert keys is not None
            far = ~window.holds(queries[:, :, None], keys[:, None, :])
            masks[kind] = mask.masked_fill(far[:, None], torch.finfo(mask.dtype).min)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def unwrapped(model: Any) -> PreTrainedModel:
    """The Transformers model inside a PeftModel or a compiled module; else the model itself."""
    inner = getattr(model, "_orig_mod", model)
    base = getattr(inner, "get_base_model", None)
    return inner if base is None else base()


def encoder_width(model: Any) -> int:
    """D of the encoder's output [S, D]."""
    config = getattr(model.get_encoder(), "config", model.config)
    return config.get_text_config().hidden_size


def device_of(model: Any) -> torch.device:
    """Where a model takes its inputs: its device, or where modules that are off-loaded compute."""
    if torch.device(model.device).type != "meta":
        return model.device
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    return model.device


def check_states(config: PretrainedConfig) -> None:
    """Refuse models behind whose states no drafter can go on. Raises ValueError.

    Positions must be rotary: what a state drafter feeds its layers is no embedded token.
    """
    settings = config.get_text_config(decoder=True).to_dict()
    plain = list(attention_windows(config).values()) == [None]
    if config.is_encoder_decoder or not settings.get("rope_parameters") or not plain:
        raise ValueError(
            f"a {config.model_type!r} model cannot have a drafter behind its states: its layers "
            "do not take positions by rotation alone, or attend to a window; use Llama, Mistral, "
            "Qwen2 or Qwen3, or a drafter that reads texts itself "
            "(recipes/train_parallel_drafter.py)"
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
    check_stateless(type(unwrapped(model)), model.config)


def source_limit(config: PretrainedConfig) -> int | None:
    """Most tokens of a source, or of a decoder-only model's prompt; None = no limit.

    Encoders that read features have lengths of their own (`max_source_positions`).
    """
    settings = config.to_dict()
    for name in ("max_source_positions", "max_encoder_position_embeddings"):
        if config.is_encoder_decoder and name in settings:
            return settings[name]
    return position_limit(config)


def position_limit(config: PretrainedConfig) -> int | None:
    """Most tokens that the decoder can be fed, its prefix included; None = no limit."""
    if not config.is_encoder_decoder:
        config = config.get_text_config(decoder=True)
    settings = config.to_dict()
    for name in ("max_target_positions", "max_decoder_position_embeddings"):
        if name in settings:
            return settings[name]
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
