"""Builds a Spec-Drafter from a target: the family's class with E encoder and D decoder layers.

With more layers than the target, layer i copies target layer floor(i L_target / L) (SpecDec
initialises its encoder from BART-base this way). With fewer, layers copy evenly spaced ones,
including the first and the last: the output projection reads what the last one computes.
"""

from __future__ import annotations

import copy
import re
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
from drafttrain.models.weight_files import first_line

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
    ConfigError for families without Spec-Drafters and settings that do not fit together, and
    ValueError like `DraftShape`.
    """
    if family_class(target) is None:
        raise ConfigError(
            f"target.path = {target.name_or_path!r} is a {target.model_type!r} model, but "
            "Spec-Drafters are for encoder-decoder language models (T5, BART, Marian, ...); for a "
            "decoder-only one start from recipes/causal.yaml"
        )
    encoder = _choose_encoder(target, settings)
    config = _of_depth(target, settings, 0 if encoder == "target" else None)
    vocabulary = vocabulary_size(target)
    check_output_tokens(settings.output_tokens, vocabulary)
    if mask_id is None:
        mask_id = vocabulary
        _set_vocabulary(config, vocabulary + 1)
    for part in (config, *_parts(config)):
        for names, value in ((DROPOUTS, settings.dropout), (NO_DROPOUTS, 0.0)):
            for name in names:
                if hasattr(part, name):
                    setattr(part, name, value)
    given = {"slots", "prefix_attention", "source_pooling", "previous_token_rank"}
    shape = DraftShape(
        mask_id,
        vocabulary,
        **settings.model_dump(include=given),
        encoder=encoder,
        logit_scale=logit_scale,
    )
    mark(config, shape)
    config.k, config.target = settings.k, identity
    config.draftable_tokens = None
    _override(config, target, settings.overrides)
    return config


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns the configurations of encoder and decoder, empty if the family has only one."""
    parts = (getattr(config, part, None) for part in ("encoder", "decoder"))
    return [part for part in parts if isinstance(part, PretrainedConfig)]


def _of_depth(
    target: PretrainedConfig, settings: DrafterConfig, encoder: int | None
) -> PretrainedConfig:
    """Returns the target's configuration with the drafter's numbers of layers.

    encoder: number of encoder layers; None: that of the settings or the target.
    """
    target_depths = depths(target)
    if encoder is None:
        encoder = settings.encoder_layers or target_depths[0]
    layers = (encoder, settings.decoder_layers)
    config = copy.deepcopy(target)
    config.architectures = None
    if parts := _parts(config):
        for name, part, count in zip(("encoder", "decoder"), parts, layers, strict=True):
            cut = shallow_config(part, spread(count, part.num_hidden_layers) if count else [])
            setattr(config, name, cut)
        return config
    if isinstance(windows := getattr(target, "attention_window", None), list):  # LED's encoder
        config.attention_window = [windows[layer] for layer in spread(encoder, target_depths[0])]
    names = next(names for names in DEPTHS if hasattr(target, names[0]))
    for name, count in zip(names, layers, strict=True):
        setattr(config, name, count)
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
    """Applies `drafter.overrides`. Raises ConfigError for unknown fields, fields in which drafter
    and target must agree, and fields of which Transformers cannot make a model."""
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
    try:
        for name, value in overrides.items():
            setattr(config, name, value)
        if overrides:
            with torch.device("meta"):
                empty_drafter(config)
    except Exception as error:  # of many classes
        raise ConfigError(
            f"drafter.overrides = {overrides} gives no model: {first_line(error)}; correct it"
        ) from None


def _choose_encoder(target: PretrainedConfig, settings: DrafterConfig) -> str:
    """Returns whether the drafter has its own encoder or reads the target's (`own`, `target`).
    Raises ConfigError for settings that do not fit."""
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
            "states, but the drafter has its own encoder; leave it out, or use "
            "drafter.encoder=target"
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
    """Makes the initial Spec-Drafter of a target, in train mode.

    Also returns the names of trained parameters that are copied from the target; others are drawn
    from torch's default generator. initialise: none, encoder (with embeddings and output) or both.
    Raises ConfigError if a weight has another shape than the target's.
    """
    drafter, names = empty_drafter(config, dtype), []
    if initialise != "none":
        _untie(drafter, target)
        names = _copy(drafter, target, initialise)
    called = [drafter.get_decoder(), drafter.get_output_embeddings(), drafter.previous_token]
    called += [drafter.get_encoder()] if drafter.shape.encoder == "own" else []
    used = {id(one) for part in called if part is not None for one in part.parameters()}
    for name, parameter in drafter.named_parameters():
        if id(parameter) not in used or "_global." in name:  # LED's attention to chosen tokens
            parameter.requires_grad_(False)  # DDP would wait for its gradient
    trained = {name for name, one in drafter.named_parameters() if one.requires_grad}
    return drafter.train(), [name for name in names if name in trained]


def _untie(drafter: SpecDrafter, target: PreTrainedModel) -> None:
    """Gives the drafter a separate output matrix if the target has one, despite its config.json."""
    output, embedded = target.get_output_embeddings(), target.get_decoder().embed_tokens
    drafter_output = drafter.get_output_embeddings()
    tied = output.weight.shape == embedded.weight.shape and torch.equal(
        output.weight, embedded.weight
    )
    if not tied and drafter_output.weight is drafter.embed_tokens.weight:
        drafter_output.weight = nn.Parameter(drafter_output.weight.detach().clone())


def _copy(drafter: SpecDrafter, target: PreTrainedModel, initialise: str) -> list[str]:
    """Copies the target's weights into a drafter; returns the names of copied weights."""
    target_weights, weights = target.state_dict(), drafter.state_dict()
    counts = zip(("encoder", "decoder"), depths(drafter.config), depths(target.config), strict=True)
    taken = {part: spread(count, depth) if count else [] for part, count, depth in counts}
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
    if weight.dim() == value.dim() and sorted(more)[-1:] == [1] and sum(map(abs, more)) == 1:
        mean = value.float().mean(more.index(1), keepdim=True).to(value.dtype)
        value = torch.cat((value, mean), dim=more.index(1))
    if weight.shape != value.shape:
        raise ConfigError(
            f"drafter parameter {name} has the shape {tuple(weight.shape)}, but {source} of the "
            f"target has {tuple(value.shape)}; give drafter.initialise=none"
        )
    weight.copy_(value)
