"""Language models that are made here: of random weights, or of some layers of another one."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from drafttrain.config.base import ConfigError

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What a config.json names; a drafter has these from its target."""


def family_defaults(fields: Mapping[str, Any], name: str) -> PretrainedConfig:
    """The default configuration of the family that `model_type` names, whose fields all others are.

    name: of the setting, for messages. Raises ConfigError for an unknown family or field, with the
    nearest known one.
    """
    family = fields.get("model_type")
    if family is None:
        raise ConfigError(f"{name}.model_type is missing; give one, such as marian, t5 or llama")
    if family not in CONFIG_MAPPING:
        near = get_close_matches(str(family), list(CONFIG_MAPPING), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "give one, such as marian, t5 or llama"
        raise ConfigError(f"{name}.model_type = {family!r} is unknown to Transformers; {hint}")
    config = AutoConfig.for_model(family)
    known = config.to_dict().keys() | config.attribute_map.keys()
    for field in sorted(fields.keys() - known):
        near = get_close_matches(str(field), sorted(known), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"unknown setting '{name}.{field}' of a {family!r} model; {hint}")
    return config


def random_model(
    kind: Any, fields: Mapping[str, Any], given: Mapping[str, Any], name: str
) -> PreTrainedModel:
    """A model of an Auto class with random weights, of these fields and what is given besides.

    Draws from torch's generator. Raises ConfigError for fields that contradict each other.
    """
    values = {**fields, **given}
    try:
        return kind.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    except (KeyError, ValueError, StrictDataclassError) as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ")
        raise ConfigError(
            f"{name} = {dict(fields)}: {reason.rstrip('.')}; change one of the two"
        ) from None


def keep_writable(model: PreTrainedModel) -> None:
    """Leave nothing but the token ids of a generation_config that Transformers reads but refuses to
    write, as one with a temperature and no do_sample; says so."""
    if not model.can_generate():
        return
    given = model.generation_config
    try:
        given.validate(strict=True)
    except ValueError as error:
        kept = {name: value for name, value in given.to_dict().items() if name.endswith("token_id")}
        model.generation_config = GenerationConfig(**kept)
        reason = " ".join(str(error).split()).removeprefix("GenerationConfig is invalid: - ")
        print(
            "generation_config: only its token ids are written; Transformers refuses to write its "
            f"other settings ({reason.partition('. ')[0]})",
            file=sys.stderr,
        )


def spread(own: int, theirs: int) -> list[int]:
    """Which target layer each drafter layer starts from."""
    if own >= theirs:
        return [i * theirs // own for i in range(own)]
    if own == 1:
        return [theirs - 1]
    return [round(i * (theirs - 1) / (own - 1)) for i in range(own)]


def take_layers(
    weights: Mapping[str, Tensor], stem: str, taken: Sequence[int]
) -> dict[str, Tensor]:
    """The same weights with these layers alone, numbered from 0; `stem` is what the names of all
    layers begin with, up to the number."""
    own = {name: value for name, value in weights.items() if not name.startswith(stem)}
    for layer, source in enumerate(taken):
        begins = f"{stem}{source}."
        own |= {
            f"{stem}{layer}.{name.removeprefix(begins)}": value
            for name, value in weights.items()
            if name.startswith(begins)
        }
    return own


def layer_stem(model: PreTrainedModel) -> str:
    """What the names of a decoder-only model's layers begin with, up to the number.

    Raises ValueError where they are not found.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return f"{name}."
    raise ValueError(
        f"the layers of a {model.config.model_type!r} model were not found; start from another "
        "model (initialise.path)"
    )


LAYER_NUMBERS = ("mlp_only_layers", "moe_layers")
"""Entries of a config.json that list numbers of layers; other lists have an entry a layer."""
FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index")
"""Entries that say how many of the first layers are dense, where the others have experts."""
STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
"""Entries by which every so many layers have experts."""


def shallow_config(target: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The target's config.json with these of its layers alone, in rising order.

    What it says of single layers is cut with them. Raises ConfigError where that cannot be said of
    fewer layers.
    """
    config, values = copy.deepcopy(target), target.to_dict()
    for name, value in values.items():
        if name in LAYER_NUMBERS and value is not None:
            setattr(config, name, [new for new, old in enumerate(layers) if old in value])
        elif "layer" in name and isinstance(value, list) and len(value) == target.num_hidden_layers:
            setattr(config, name, [value[layer] for layer in layers])
        elif name in FIRST_LAYERS and value is not None:
            setattr(config, name, sum(layer < value for layer in layers))
        elif name in STEPS and value not in (None, 0, 1):
            raise ConfigError(
                f"the target's {name} = {value} counts layers, which a drafter of the layers "
                f"{list(layers)} cannot keep; start from another model (initialise.path)"
            )
    if "moe_layer_end_index" in values:
        config.moe_layer_end_index = len(layers) - 1
    config.num_hidden_layers = len(layers)
    return config
