"""Write a loaded encoder-decoder model in CTranslate2's format. No tokenizer has a part in it.

The model's modules fill CTranslate2's own specification, by the methods of its own converters; what
those would read from a tokenizer, or from settings that not every configuration has, is taken from
the modules. Tokens are named by their ids: "0", "1", ... Which token starts a decoder and which
ones end an output is said with each call, not in the converted model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    BartForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    MT5ForConditionalGeneration,
    PegasusForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)

from drafttrain.config.base import ConfigError

PACKAGE = "ctranslate2"
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_python": "GELU",
    "gelu_new": "GELUTanh",
    "gelu_fast": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
    "swish": "SWISH",
}
"""CTranslate2's names of the activations that it has, by Transformers' names."""


@dataclass(frozen=True)
class Family:
    """How the models of a class are converted."""

    fill: Callable[[PreTrainedModel], Any]
    """Makes the filled specification, its tokens named."""
    activation: str
    """The setting that names the activation of the feed-forward layers."""
    activations: frozenset[str] = frozenset(ACTIVATIONS)
    """Those that are there."""


def package_version() -> str:
    """The version of CTranslate2 that is installed."""
    return version(PACKAGE)


def check_installed(asked: str) -> None:
    """Raise ConfigError where CTranslate2 is not installed. asked: the setting that needs it."""
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            f"{asked} needs the package {PACKAGE!r}, which is not installed; run "
            f"`pip install {PACKAGE}`, or leave it out"
        )


def check_convertible(config: PretrainedConfig, asked: str) -> None:
    """Refuse models that cannot be converted, from their configuration. Raises ConfigError.

    asked: the setting that asks for CTranslate2.
    """
    mappings = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    kinds = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    family = FAMILIES.get(kinds[0]) if kinds and config.is_encoder_decoder else None
    if family is None:
        raise ConfigError(
            f"{asked}, but a {config.model_type!r} model cannot be converted to CTranslate2's "
            "format here; give an encoder-decoder target of a known family (T5, BART, mBART, "
            "Pegasus, Marian, Whisper), or leave ctranslate2 out"
        )
    activation = getattr(config, family.activation)
    if activation not in family.activations:
        known = ", ".join(name for name in ACTIVATIONS if name in family.activations)
        raise ConfigError(
            f"{asked}, but CTranslate2 has no activation {activation!r}, which the target's "
            f"config.json sets ({known} are there); leave ctranslate2 out"
        )


@torch.no_grad()
def convert(model: PreTrainedModel, folder: Path) -> None:
    """Write a model into a folder that exists, in float32. Quantised numbers are made on loading.

    Raises ConfigError for models of other families.
    """
    check_convertible(model.config, PACKAGE)
    spec = FAMILIES[type(model)].fill(model)
    _to_float32(spec)
    spec.validate()
    spec.optimize()
    spec.save(str(folder))


def _name_tokens(spec: Any) -> None:
    """Of texts. Start and end tokens come with each call; with no end token in the vocabulary, no
    source is taken for an empty one either."""
    spec.config.decoder_start_token = None
    spec.register_source_vocabulary(_names(spec.encoder.embeddings[0]))
    spec.register_target_vocabulary(_names(spec.decoder.embeddings))


def _names(embeddings: Any) -> list[str]:
    return [str(token) for token in range(len(embeddings.weight))]


def _to_float32(spec: Any) -> None:
    """All weights as float32 on the CPU, which is what is written; integers stay."""
    from ctranslate2.specs.model_spec import visit_spec

    def turn(owner: Any, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(owner, name.rpartition("/")[2], value.detach().float().cpu())

    visit_spec(spec, turn)


def _fill_bart(model: PreTrainedModel, pre_norm: bool, norm_embedding: bool) -> Any:
    """BART and its kin, which differ in where they normalise.

    Logits are the output embeddings' product with the last hidden state, plus a bias.
    """
    from ctranslate2.converters.transformers import BartLoader

    config, loader = model.config, BartLoader()
    shape = {
        "pre_norm": pre_norm,
        "layernorm_embedding": norm_embedding,
        "activation": _activation(config.activation_function),
    }
    spec = _empty(
        (config.encoder_layers, config.encoder_attention_heads),
        (config.decoder_layers, config.decoder_attention_heads),
        shape,
    )
    loader.set_encoder(spec.encoder, model.get_encoder())
    loader.set_decoder(spec.decoder, model.get_decoder())
    loader.set_linear(spec.decoder.projection, model.lm_head)
    if model.final_logits_bias.any():
        spec.decoder.projection.bias = model.final_logits_bias.flatten()
    spec.config.layer_norm_epsilon = model.get_encoder().layers[0].final_layer_norm.eps
    _name_tokens(spec)
    return spec


def _fill_t5(model: PreTrainedModel) -> Any:
    """T5, FLAN-T5 and mT5: relative positions, no biases, the output scaled in some."""
    from ctranslate2.converters.transformers import T5Loader

    config, loader = model.config, T5Loader()
    shape = {
        "pre_norm": True,
        "rms_norm": True,
        "relative_attention_bias": True,
        "ffn_glu": config.is_gated_act,
        "activation": _activation(config.dense_act_fn),
    }
    spec = _empty(
        (config.num_layers, config.num_heads), (config.num_decoder_layers, config.num_heads), shape
    )
    loader.set_stack(spec.encoder, model.get_encoder())
    loader.set_stack(spec.decoder, model.get_decoder(), is_decoder=True)
    loader.set_linear(spec.decoder.projection, model.lm_head)
    if config.scale_decoder_outputs:
        spec.decoder.scale_outputs = config.d_model**-0.5
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    _name_tokens(spec)
    return spec


def _fill_whisper(model: PreTrainedModel) -> Any:
    """Whisper: the control tokens have the names that CTranslate2 looks for."""
    from ctranslate2.converters.transformers import WhisperLoader

    settings = model.generation_config
    spec = WhisperLoader().get_model_spec(model)
    names = _names(spec.decoder.embeddings)
    names[settings.decoder_start_token_id] = "<|startoftranscript|>"
    names[settings.eos_token_id] = "<|endoftext|>"
    names[settings.no_timestamps_token_id] = "<|notimestamps|>"
    spec.register_vocabulary(names)
    spec.config.suppress_ids = settings.suppress_tokens or []
    spec.config.suppress_ids_begin = settings.begin_suppress_tokens or []
    spec.config.lang_ids = sorted((getattr(settings, "lang_to_id", None) or {}).values())
    return spec


def _empty(encoder: tuple[int, int], decoder: tuple[int, int], shape: dict[str, Any]) -> Any:
    """A specification to be filled. encoder, decoder: their layers and heads."""
    from ctranslate2.specs import transformer_spec

    return transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(*encoder, **shape),
        transformer_spec.TransformerDecoderSpec(*decoder, **shape),
    )


def _activation(name: str) -> Any:
    from ctranslate2.specs.common_spec import Activation

    return Activation[ACTIVATIONS[name]]


FAMILIES = {
    BartForConditionalGeneration: Family(
        partial(_fill_bart, pre_norm=False, norm_embedding=True), "activation_function"
    ),
    MarianMTModel: Family(
        partial(_fill_bart, pre_norm=False, norm_embedding=False), "activation_function"
    ),
    MBartForConditionalGeneration: Family(
        partial(_fill_bart, pre_norm=True, norm_embedding=True), "activation_function"
    ),
    PegasusForConditionalGeneration: Family(
        partial(_fill_bart, pre_norm=True, norm_embedding=False), "activation_function"
    ),
    T5ForConditionalGeneration: Family(_fill_t5, "dense_act_fn"),
    WhisperForConditionalGeneration: Family(
        _fill_whisper, "activation_function", frozenset({"gelu"})
    ),
    MT5ForConditionalGeneration: Family(_fill_t5, "dense_act_fn"),
}
"""Classes of models that can be converted."""
