"""Makes language models: with random weights, or from some layers of another model."""

import copy
import inspect
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
"""Token ids in a config.json that a drafter takes from its target."""


def family_defaults(fields: Mapping[str, Any]) -> PretrainedConfig:
    """Returns the default configuration of the family `model_type`; checks the other fields' names.

    Raises ConfigError for an unknown family or field, and suggests the nearest known one.
    """
    family = fields.get("model_type")
    if family is None:
        raise ConfigError("model.model_type is missing; give one, such as marian, t5 or llama")
    if family not in CONFIG_MAPPING:
        near = get_close_matches(str(family), list(CONFIG_MAPPING), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "give one, such as marian, t5 or llama"
        raise ConfigError(f"model.model_type = {family!r} is unknown to Transformers; {hint}")
    config = AutoConfig.for_model(family)
    if config.to_dict().get("attn_type") == "bi":  # XLNet
        raise ConfigError(
            f"model.model_type = {family!r} attends to later tokens; give another, such as llama"
        )
    known = config.to_dict().keys() | config.attribute_map.keys()
    for field in sorted(fields.keys() - known):
        near = get_close_matches(str(field), sorted(known), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"unknown setting 'model.{field}' of a {family!r} model; {hint}")
    return config


def random_model(kind: Any, fields: Mapping[str, Any], given: Mapping[str, Any]) -> PreTrainedModel:
    """Makes a model with random weights from an Auto class and config.json fields.

    `given` overrides `fields`. Draws from torch's default generator. Raises ConfigError for fields
    that contradict each other.
    """
    values = {**fields, **given}
    try:
        return kind.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    except (KeyError, ValueError, StrictDataclassError) as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ")
        raise ConfigError(
            f"model = {dict(fields)}: {reason.rstrip('.')}; change one of the two"
        ) from None


def takes_positions(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether a decoder-only family accepts masks [B, 1, T, T] and explicit positions, which packed
    rows and masked blocks need."""
    settings = config.get_text_config(decoder=True).to_dict()
    if settings.get("alibi") or config.model_type == "openai-gpt":  # only accept masks [B, T]
        return False
    return "position_ids" in inspect.signature(kind.forward).parameters


def keep_writable(model: PreTrainedModel) -> None:
    """Reduces a generation_config that Transformers refuses to write to its token ids.

    Transformers reads such files, for example with a temperature but no do_sample. Prints a line.
    """
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


def spread(count: int, depth: int) -> list[int]:
    """Returns the target layer that each drafter layer is initialised from, evenly spaced."""
    if count == 0 or count >= depth:
        return [i * depth // count for i in range(count)]
    if count == 1:
        return [depth - 1]
    return [round(i * (depth - 1) / (count - 1)) for i in range(count)]


def take_layers(
    weights: Mapping[str, Tensor], stem: str, taken: Sequence[int]
) -> dict[str, Tensor]:
    """Keeps the weights of the layers `taken`, renumbered from 0, and all weights outside layers.

    stem: prefix of the names of all layers, up to the layer number.
    """
    kept = {name: value for name, value in weights.items() if not name.startswith(stem)}
    for layer, source in enumerate(taken):
        prefix = f"{stem}{source}."
        kept |= {
            f"{stem}{layer}.{name.removeprefix(prefix)}": value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
    return kept


def layer_stem(model: PreTrainedModel) -> str:
    """Returns the prefix of the names of a decoder-only model's layers, up to the layer number.

    Raises ValueError if the layers are not found.
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
"""Entries of a config.json that list layer numbers; other lists have one entry per layer."""
FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index")
"""Entries with the number of dense layers before the first layer with experts."""
STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
"""Entries with the distance between layers with experts."""


def shallow_config(target: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """Returns the target's config.json for a model of these layers only, in rising order.

    Entries about single layers are cut to these layers. Raises ConfigError for entries that do not
    apply to fewer layers.
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
