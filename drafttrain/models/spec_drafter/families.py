"""Families of targets that Spec-Drafters start from: their shapes, and the names of their weights.

Growing depth maps target layer floor(i * L_target / L_drafter) to layer i (SpecDec initialises the
encoder from BART-base this way); a shallower decoder takes evenly spaced layers, the first and the
last among them, since the last ones write what the output projection reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PretrainedConfig

from drafttrain.models.language_models import spread
from drafttrain.models.spec_drafter.config import SpecDrafterConfig


def _bart_shape(config: PretrainedConfig) -> dict:
    if config.model_type == "marian" and not config.share_encoder_decoder_embeddings:
        raise ValueError(
            "this Marian model has separate source and target vocabularies "
            "(share_encoder_decoder_embeddings=false); a Spec-Drafter needs a shared one"
        )
    pre_norm = config.model_type in ("mbart", "pegasus")
    learned = config.model_type in ("bart", "mbart")
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "attention_heads": config.encoder_attention_heads,
        "ffn_dim": config.encoder_ffn_dim,
        "activation": config.activation_function,
        "norm": "layer",
        "norm_position": "pre" if pre_norm else "post",
        "bias": True,
        "positions": "learned" if learned else "sinusoidal",
        "max_positions": config.max_position_embeddings,
        "position_offset": 2 if learned else 0,
        "embedding_scale": config.d_model**0.5 if config.scale_embedding else 1.0,
        "embedding_norm": learned,
        "untied_output": not config.tie_word_embeddings,
        "logits_bias": True,
    }


def _whisper_shape(config: PretrainedConfig) -> dict:
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "attention_heads": config.decoder_attention_heads,
        "ffn_dim": config.decoder_ffn_dim,
        "activation": config.activation_function,
        "norm": "layer",
        "norm_position": "pre",
        "bias": True,
        "positions": "learned",
        "max_positions": config.max_target_positions,
        "embedding_scale": config.d_model**0.5 if config.scale_embedding else 1.0,
        "untied_output": not config.tie_word_embeddings,
    }


def _t5_shape(config: PretrainedConfig) -> dict:
    # T5 v1.0 ties its output rows and scales them; v1.1, FLAN and mT5 do neither
    scaled = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.num_layers,
        "attention_heads": config.num_heads,
        "head_dim": config.d_kv,
        "ffn_dim": config.d_ff,
        "activation": config.dense_act_fn,
        "gated_ffn": config.is_gated_act,
        "norm": "rms",
        "norm_position": "pre",
        "norm_eps": config.layer_norm_epsilon,
        "bias": False,
        "positions": "relative",
        "relative_buckets": config.relative_attention_num_buckets,
        "relative_max_distance": config.relative_attention_max_distance,
        "attention_scale": 1.0,
        "logit_scale": config.d_model**-0.5 if scaled else 1.0,
        "untied_output": not scaled,
    }


@dataclass(frozen=True)
class Family:
    """How targets of some model types are read."""

    shape: Callable[[PretrainedConfig], dict]
    layer: str
    """Name of one of the target's layers."""
    decoder_layers: str
    """Where its configuration counts those of the decoder."""
    modules: dict[str, tuple[str, ...]]
    """The drafter's module -> the target's that it holds, one after the other."""


_BART = Family(
    _bart_shape,
    "model.{part}.layers.{number}",
    "decoder_layers",
    {
        "embedding": ("model.shared",),
        "output": ("lm_head",),
        "logits_bias": ("final_logits_bias",),
        "{part}.learned_positions": ("model.{part}.embed_positions",),
        "{part}.embedding_norm": ("model.{part}.layernorm_embedding",),
        "{part}.final_norm": ("model.{part}.layer_norm",),
        "{own}.self_attention.qkv": tuple(f"{{layer}}.self_attn.{x}_proj" for x in "qkv"),
        "{own}.self_attention.out": ("{layer}.self_attn.out_proj",),
        "{own}.self_norm": ("{layer}.self_attn_layer_norm",),
        "{own}.cross_attention.query": ("{layer}.encoder_attn.q_proj",),
        "{own}.cross_attention.kv": tuple(f"{{layer}}.encoder_attn.{x}_proj" for x in "kv"),
        "{own}.cross_attention.out": ("{layer}.encoder_attn.out_proj",),
        "{own}.cross_norm": ("{layer}.encoder_attn_layer_norm",),
        "{own}.feed_forward.up": ("{layer}.fc1",),
        "{own}.feed_forward.down": ("{layer}.fc2",),
        "{own}.feed_forward_norm": ("{layer}.final_layer_norm",),
    },
)
_WHISPER = Family(
    _whisper_shape,
    _BART.layer,
    _BART.decoder_layers,
    _BART.modules | {"embedding": ("model.decoder.embed_tokens",), "output": ("proj_out",)},
)
_T5 = Family(
    _t5_shape,
    "{part}.block.{number}.layer",
    "num_decoder_layers",
    {
        "embedding": ("shared",),
        "output": ("lm_head",),
        "{part}.relative_bias.embedding": (
            "{part}.block.0.layer.0.SelfAttention.relative_attention_bias",
        ),
        "{part}.final_norm": ("{part}.final_layer_norm",),
        "{own}.self_attention.qkv": tuple(f"{{layer}}.0.SelfAttention.{x}" for x in "qkv"),
        "{own}.self_attention.out": ("{layer}.0.SelfAttention.o",),
        "{own}.self_norm": ("{layer}.0.layer_norm",),
        "{own}.cross_attention.query": ("{layer}.1.EncDecAttention.q",),
        "{own}.cross_attention.kv": tuple(f"{{layer}}.1.EncDecAttention.{x}" for x in "kv"),
        "{own}.cross_attention.out": ("{layer}.1.EncDecAttention.o",),
        "{own}.cross_norm": ("{layer}.1.layer_norm",),
        "{own}.feed_forward.up": ("{layer}.{last}.DenseReluDense.{up}",),
        "{own}.feed_forward.gate": ("{layer}.{last}.DenseReluDense.wi_0",),
        "{own}.feed_forward.down": ("{layer}.{last}.DenseReluDense.wo",),
        "{own}.feed_forward_norm": ("{layer}.{last}.layer_norm",),
    },
)
FAMILIES = dict.fromkeys(("marian", "bart", "mbart", "pegasus"), _BART)
FAMILIES |= dict.fromkeys(("t5", "mt5"), _T5) | {"whisper": _WHISPER}


def decoder_sources(layers: int, target: PretrainedConfig) -> list[int]:
    """The target's layers that a decoder of so many starts from."""
    return spread(layers, getattr(target, FAMILIES[target.model_type].decoder_layers))


def weight_sources(own: SpecDrafterConfig, target: PretrainedConfig) -> dict[str, list[str]]:
    """Drafter parameter -> target parameters that it starts from, one after the other.

    Of all that models of the family may have; each lacks some.
    """
    family = FAMILIES[target.model_type]
    parts = [("decoder", 2, decoder_sources(own.decoder_layers, target))]
    if own.encoder == "own":
        parts.append(("encoder", 1, spread(own.encoder_layers, target.num_hidden_layers)))
    sources = {}
    for part, last, numbers in parts:
        for i, number in enumerate(numbers):
            places = {
                "part": part,
                "own": f"{part}.layers.{i}",
                "layer": family.layer.format(part=part, number=number),
                "last": last,
                "up": "wi_1" if own.gated_ffn else "wi",
            }
            for name, theirs in family.modules.items():
                for kind in ("", ".weight", ".bias"):
                    found = [module.format(**places) + kind for module in theirs]
                    sources[name.format(**places) + kind] = found
                    slots = places | {"own": f"{places['own']}.slots"}
                    sources[name.format(**slots) + kind] = found
    return sources
