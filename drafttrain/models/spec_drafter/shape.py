"""The shape of a Spec-Drafter: its target's, and what the settings ask for."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import DrafterConfig
from drafttrain.models.draft_states import state_size
from drafttrain.models.spec_drafter.config import SpecDrafterConfig
from drafttrain.models.spec_drafter.families import FAMILIES, decoder_sources
from drafttrain.models.speech import hears


def drafter_shape(config: PretrainedConfig) -> dict:
    """Spec-Drafter fields that follow the target's family. Raises ValueError for other families."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"no Spec-Drafter shape is known for model type {config.model_type!r}; known: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[config.model_type].shape(config)


def has_own_output(target: PreTrainedModel) -> bool:
    """Whether the target's output rows differ from its embeddings; its configuration can be wrong.

    Raises ValueError where encoder and decoder embed tokens differently: a Spec-Drafter shares one
    table.
    """
    embedding = target.get_input_embeddings().weight
    parts = (target.get_encoder(), target.get_decoder())
    tables = [part.get_input_embeddings() for part in parts]
    for own in (table.weight for table in tables if isinstance(table, nn.Embedding)):
        if own.shape != embedding.shape or not torch.equal(own, embedding):
            raise ValueError(
                "the target's encoder and decoder have embeddings of their own; a Spec-Drafter "
                "needs a shared table"
            )
    output = target.get_output_embeddings().weight
    return output.shape != embedding.shape or not torch.equal(output, embedding)


def make_config(
    target: PretrainedConfig,
    settings: DrafterConfig,
    mask_id: int | None,
    identity: dict | None = None,
    untied_output: bool | None = None,
) -> SpecDrafterConfig:
    """The drafter's configuration for a target. `identity` records which target it is for.

    With `output_tokens=used` it has none yet: they are counted when the outputs are there.
    untied_output is read off the target's configuration where it is not given; `has_own_output`
    reads it off the weights. Raises ConfigError for a width that is not the target's but is to
    start from its weights, and for one that its heads do not fit in.
    """
    shape = drafter_shape(target)
    if untied_output is not None:
        shape["untied_output"] = untied_output
    shape["encoder"] = _choose_encoder(target, settings)
    if shape["encoder"] == "target":
        shape["encoder_layers"] = 0
    shape["source_width"] = shape["d_model"]
    if settings.encoder_layers is not None:
        shape["encoder_layers"] = settings.encoder_layers
    shape |= _resized(shape, settings)
    if shape["encoder"] == "own":
        shape["source_width"] = shape["d_model"]
    shape["output_tokens"] = _count_draftable(settings, shape["vocab_size"])
    taken = decoder_sources(settings.decoder_layers, target)
    if shape["encoder"] == "target" and settings.initialise == "both":
        shape["cross_layers"] = taken
    given = {"decoder_layers", "dropout", "k", "slots", "prefix_attention"}
    given |= {"source_pooling", "slot_weights", "slot_attention", "feeds_first"}
    if settings.target_states:
        shape["state_width"] = state_size(target, "token")
        if settings.initialise == "both":
            shape["told_layer"] = taken[0] or None
    return SpecDrafterConfig(
        **shape,
        **settings.model_dump(include=given | {"previous_token_rank"}),
        mask_id=mask_id,
        pad_token_id=target.pad_token_id,
        eos_token_id=target.eos_token_id,
        decoder_start_token_id=target.decoder_start_token_id,
        target=identity,
    )


def _count_draftable(settings: DrafterConfig, vocabulary: int) -> int | None:
    """How many tokens can be drafted, of a drafter of few; of those that are used, none yet.
    Raises ConfigError for more than there are."""
    asked = settings.output_tokens
    if asked is None or asked == "used":
        return None
    if asked > vocabulary:
        raise ConfigError(
            f"drafter.output_tokens = {asked} is more than the target's {vocabulary} tokens; give "
            "fewer, or leave it out"
        )
    return asked


def _choose_encoder(target: PretrainedConfig, settings: DrafterConfig) -> str:
    """Whose encoder the drafter reads. Raises ConfigError for one that cannot be."""
    heard = hears(target)
    chosen = settings.encoder or ("target" if heard else "own")
    if chosen == "own" and heard:
        raise ConfigError(
            f"drafter.encoder = 'own', but the inputs of a {target.model_type!r} model are audio, "
            "which a Spec-Drafter does not encode; use drafter.encoder=target"
        )
    if chosen == "target" and settings.encoder_layers is not None:
        raise ConfigError(
            f"drafter.encoder_layers = {settings.encoder_layers} counts for an encoder of its own, "
            "but the drafter reads the target's; leave it out, or use drafter.encoder=own"
        )
    if chosen == "own" and settings.source_pooling != 1:
        raise ConfigError(
            f"drafter.source_pooling = {settings.source_pooling} pools what the target's encoder "
            "puts out, but the drafter has an encoder of its own; leave it out, or use "
            "drafter.encoder=target"
        )
    return chosen


def _resized(shape: dict, settings: DrafterConfig) -> dict:
    """The fields of a shape that change with its width, its heads and its feed-forward layers."""
    sizes = {"d_model", "attention_heads", "ffn_dim"}
    asked = settings.model_dump(include=sizes, exclude_none=True)
    other = [name for name, value in asked.items() if value != shape[name]]
    if other and settings.initialise != "none":
        name = other[0]
        raise ConfigError(
            f"drafter.{name} = {asked[name]} is not the target's {shape[name]}, so no part can "
            f"start from its weights, but drafter.initialise={settings.initialise}; set it to none"
        )
    changed = _widened(shape, asked["d_model"]) if "d_model" in asked else {}
    changed |= asked
    if "attention_heads" in other:
        width, heads = changed.get("d_model", shape["d_model"]), asked["attention_heads"]
        if width % heads:
            raise ConfigError(
                f"drafter.attention_heads = {heads} does not divide the width {width}; give a "
                "number that does"
            )
        changed["head_dim"] = width // heads
    return changed


def _widened(shape: dict, width: int) -> dict:
    """The fields of a shape at another width: heads as large, feed-forward layers in proportion."""
    before = shape["d_model"]
    heads, left = divmod(shape["attention_heads"] * width, before)
    if left:
        raise ConfigError(
            f"drafter.d_model = {width} does not hold whole heads of the target's "
            f"({shape['attention_heads']} in {before}); give a multiple of "
            f"{before // math.gcd(before, shape['attention_heads'])}"
        )
    grown = width / before
    return {
        "d_model": width,
        "attention_heads": heads,
        "ffn_dim": round(shape["ffn_dim"] * grown),
        "embedding_scale": _scaled(shape.get("embedding_scale", 1.0), grown**0.5),
        "logit_scale": _scaled(shape.get("logit_scale", 1.0), grown**-0.5),
    }


def _scaled(value: float, factor: float) -> float:
    return value if value == 1.0 else value * factor
