"""Builds a Spec-Drafter from a target: the family's class with E encoder and D decoder layers.

With more layers than the target, layer i copies target layer floor(i L_target / L) (SpecDec
initialises its encoder from BART-base this way). With fewer, layers copy evenly spaced ones,
including the first and the last: the output projection reads what the last one computes.
"""

import copy
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import DrafterConfig
from drafttrain.models.draftable import check_output_tokens
from drafttrain.models.drafters import vocabulary_size
from drafttrain.models.language_models import SPECIAL_TOKENS, shallow_config, spread
from drafttrain.models.spec_drafter.model import SpecDrafter, class_of, family_class
from drafttrain.models.spec_drafter.shape import DraftShape, mark
from drafttrain.models.speech import takes_audio
from drafttrain.models.weight_files import named_errors

DEPTHS = (
    ("encoder_layers", "decoder_layers"),
    ("num_layers", "num_decoder_layers"),
    ("encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
"""Entries of config.json with the number of encoder and decoder layers; some families have one
configuration each instead."""
LAYER = re.compile(r"((?:.*\.)?(encoder|decoder)\.(?:layers|block)\.)(\d+)(\..*)")
"""Name of a layer's weight: stem, part, layer number, rest."""
FIRST_LAYER_ONLY = "relative_attention_bias.weight"
"""T5's attention bias: only layer 0 has one, so it is always copied from the target's layer 0."""
DROPOUTS = ("dropout", "dropout_rate")
NO_DROPOUTS = ("attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")


def depths(config: PretrainedConfig) -> tuple[int, int]:
    """Returns the numbers of encoder and decoder layers. Raises ConfigError if they are unknown."""
    for names in DEPTHS:
        if all(hasattr(config, name) for name in names):
            return tuple(getattr(config, name) for name in names)
    if parts := _parts(config):
        return tuple(part.num_hidden_layers for part in parts)
    raise ConfigError(
        f"a Spec-Drafter cannot be made of a {config.model_type!r} model: its config.json does not "
        "name encoder and decoder layers as other families do; draft with another kind "
        "(recipes/train_block_heads.py), or a smaller model of the family"
    )


def make_config(
    target: PretrainedConfig,
    settings: DrafterConfig,
    mask_id: int | None,
    identity: dict[str, Any] | None = None,
    logit_scale: float = 1.0,
) -> PretrainedConfig:
    """Makes the configuration of a target's Spec-Drafter.

    mask_id: None adds one embedding for the mask. identity: of the target, to record. Raises
    ConfigError, and ValueError like `DraftShape`.
    """
    if family_class(target) is None:
        raise ConfigError(
            f"target.path = {target.name_or_path!r} is a {target.model_type!r} model, but "
            "Spec-Drafters are for encoder-decoder language models (T5, BART, Marian, ...); for a "
            "decoder-only one start from recipes/causal.yaml"
        )
    encoder = _choose_encoder(target, settings)
    encoder_layers = 0 if encoder == "target" else settings.encoder_layers or depths(target)[0]
    config = _of_depth(target, encoder_layers, settings.decoder_layers)
    vocabulary = vocabulary_size(target)
    check_output_tokens(settings.output_tokens, vocabulary)
    if mask_id is None:
        mask_id = vocabulary
        _set_vocabulary(config, vocabulary + 1)
    dropouts = dict.fromkeys(DROPOUTS, settings.dropout) | dict.fromkeys(NO_DROPOUTS, 0.0)
    for part in (config, *_parts(config)):
        for name in filter(partial(hasattr, part), dropouts):
            setattr(part, name, dropouts[name])
    given = {"slots", "prefix_attention", "source_pooling", "previous_token_rank"}
    given = settings.model_dump(include=given) | {"encoder": encoder, "logit_scale": logit_scale}
    mark(config, DraftShape(mask_id, vocabulary, **given))
    config.k, config.target = settings.k, identity
    config.draftable_tokens = None
    _override(config, target, settings.overrides)
    return config


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns the configurations of encoder and decoder, empty if the family has only one."""
    parts = (getattr(config, part, None) for part in ("encoder", "decoder"))
    return [part for part in parts if isinstance(part, PretrainedConfig)]


def _of_depth(target: PretrainedConfig, encoder: int, decoder: int) -> PretrainedConfig:
    """Returns the target's configuration with these numbers of encoder and decoder layers."""
    config = copy.deepcopy(target)
    config.architectures = None
    names, counts = ("encoder", "decoder"), (encoder, decoder)
    if parts := _parts(config):
        counts = [
            shallow_config(part, spread(count, part.num_hidden_layers))
            for part, count in zip(parts, counts, strict=True)
        ]
    else:
        names = next(names for names in DEPTHS if hasattr(target, names[0]))
    if isinstance(windows := getattr(target, "attention_window", None), list):  # LED's encoder
        config.attention_window = [windows[layer] for layer in spread(encoder, depths(target)[0])]
    for name, value in zip(names, counts, strict=True):
        setattr(config, name, value)
    return config


def _set_vocabulary(config: PretrainedConfig, size: int) -> None:
    """Sets the size of the decoder's vocabulary, and of the encoder's if they are shared."""
    names = ("vocab_size", "decoder_vocab_size")
    if not getattr(config, "share_encoder_decoder_embeddings", True):
        names = names[1:]
    for part in (config, *_parts(config)):
        for name in names:
            if getattr(part, name, None) is not None:
                setattr(part, name, size)


def _override(config: PretrainedConfig, target: PretrainedConfig, overrides: dict) -> None:
    """Applies `drafter.overrides`. Raises ConfigError."""
    for name in overrides:
        if not hasattr(target, name):  # `config` has our own entries too, such as k
            raise ConfigError(
                f"drafter.overrides.{name} is not a field of a {config.model_type!r} "
                "configuration; see its config.json"
            )
        if "vocab" in name or name.endswith("_token_id") or name == "is_encoder_decoder":
            raise ConfigError(
                f"drafter.overrides.{name}: drafter and target must agree in it; leave it out"
            )
    with named_errors(f"drafter.overrides = {overrides} gives no model", "correct it"):
        for name, value in overrides.items():
            setattr(config, name, value)
        if overrides:
            with torch.device("meta"):
                empty_drafter(config)


def _choose_encoder(target: PretrainedConfig, settings: DrafterConfig) -> str:
    """Returns `own` or `target`, as in `DraftShape`. Raises ConfigError."""
    audio = takes_audio(target)
    chosen = settings.encoder or ("target" if audio else "own")
    if chosen == "own" and audio:
        raise ConfigError(
            f"drafter.encoder = 'own', but the inputs of a {target.model_type!r} model are audio, "
            "which a Spec-Drafter does not encode; use drafter.encoder=target"
        )
    if chosen == "target" and settings.encoder_layers is not None:
        raise ConfigError(
            f"drafter.encoder_layers = {settings.encoder_layers} is for drafters with their own "
            "encoder, but this one reads the target's; leave it out, or use drafter.encoder=own"
        )
    if chosen == "own" and settings.source_pooling != 1:
        raise ConfigError(
            f"drafter.source_pooling = {settings.source_pooling} averages the target's encoder "
            "states, but the drafter has its own; leave it out, or use drafter.encoder=target"
        )
    return chosen


def empty_drafter(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> SpecDrafter:
    """Makes a Spec-Drafter with random weights; previous-token features start at 0."""
    kind = class_of(config)
    if config._attn_implementation not in ("sdpa", "eager", None):  # others reject custom masks
        config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    drafter = kind._from_config(config, dtype=dtype)
    if drafter.previous_token is not None:
        nn.init.zeros_(drafter.previous_token.out.weight)
    drafter.generation_config = GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        **{name: getattr(config, name, None) for name in SPECIAL_TOKENS},
    )
    return drafter


@torch.no_grad()
def build(
    config: PretrainedConfig,
    target: PreTrainedModel,
    initialise: str,
    dtype: torch.dtype = torch.float32,
) -> tuple[SpecDrafter, list[str]]:
    """Makes the initial Spec-Drafter of a target, in train mode; also returns the names of trained
    parameters that are copied from the target.

    initialise: none, encoder (with embeddings and output) or both. Raises ConfigError if a weight
    has another shape than the target's.
    """
    drafter, names = empty_drafter(config, dtype), []
    if initialise != "none":
        _untie(drafter, target)
        names = _copy(drafter, target, initialise)
    called = [drafter.get_decoder(), drafter.get_output_embeddings(), drafter.previous_token]
    called.append(drafter.get_encoder() if drafter.shape.encoder == "own" else None)
    used = {id(one) for part in called if part is not None for one in part.parameters()}
    for name, parameter in drafter.named_parameters():
        if id(parameter) not in used or "_global." in name:  # LED's attention to chosen tokens
            parameter.requires_grad_(False)  # DDP would wait for its gradient
    trained = {name for name, one in drafter.named_parameters() if one.requires_grad}
    return drafter.train(), [name for name in names if name in trained]


def _untie(drafter: SpecDrafter, target: PreTrainedModel) -> None:
    """Gives the drafter a separate output matrix if the target has one, despite its config.json."""
    tied = torch.equal(
        target.get_output_embeddings().weight, target.get_decoder().embed_tokens.weight
    )
    output = drafter.get_output_embeddings()
    if not tied and output.weight is drafter.embed_tokens.weight:
        output.weight = nn.Parameter(output.weight.detach().clone())


def _copy(drafter: SpecDrafter, target: PreTrainedModel, initialise: str) -> list[str]:
    """Copies the target's weights into a drafter; returns the names of copied weights."""
    target_weights, weights = target.state_dict(), drafter.state_dict()
    counts = zip(("encoder", "decoder"), depths(drafter.config), depths(target.config), strict=True)
    taken = {part: spread(count, depth) for part, count, depth in counts}
    names = []
    for name, weight in weights.items():
        source = name
        if match := LAYER.fullmatch(name):
            stem, part, number, rest = match.groups()
            if initialise == "encoder" and part == "decoder":
                continue
            source = f"{stem}{taken[part][int(number)]}{rest}"
            if source not in target_weights and name.endswith(FIRST_LAYER_ONLY):
                source = f"{stem}0{rest}"
        if source in target_weights:
            _fill(weight, target_weights[source], name, source)
            names.append(name)
    return names


def _fill(weight: Tensor, value: Tensor, name: str, source: str) -> None:
    """Copies a weight; an additional row (or bias entry), for the mask, is the mean of the others.

    Raises ConfigError for other differences in shape.
    """
    more = [a - b for a, b in zip(weight.shape, value.shape, strict=False)]
    if weight.dim() == value.dim() and sorted(more) == [*[0] * (len(more) - 1), 1]:
        mean = value.float().mean(more.index(1), keepdim=True).to(value.dtype)
        value = torch.cat((value, mean), dim=more.index(1))
    if weight.shape != value.shape:
        raise ConfigError(
            f"drafter parameter {name} has the shape {tuple(weight.shape)}, but {source} of the "
            f"target has {tuple(value.shape)}; give drafter.initialise=none"
        )
    weight.copy_(value)
