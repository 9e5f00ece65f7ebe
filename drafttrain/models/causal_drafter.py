"""Causal drafters for decoder-only targets: ordinary language models, and how they are initialised.

config.json also names the target (`target`) and, for a drafter of a part of the vocabulary, its
tokens (`draftable_tokens`): drafttrain's engine then computes no other scores. Other programs load
the folder as a language model with the full vocabulary; export changes the other rows of its output
so that they never win (`demote_undrafted`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import (
    CausalDrafterRecipe,
    StateDrafterRecipe,
)
from drafttrain.models.draftable import check_output_tokens, draftable_tokens
from drafttrain.models.drafters import check_tokenizers, vocabulary_size
from drafttrain.models.language_models import (
    SPECIAL_TOKENS,
    layer_stem,
    shallow_config,
    spread,
    take_layers,
    takes_positions,
)
from drafttrain.models.loading import check_target, is_language_model, read_config
from drafttrain.models.target_embeddings import lacks_embeddings, read_whole


def check_causal_recipe(settings: CausalDrafterRecipe) -> PretrainedConfig:
    """Checks the settings without reading weights; returns the target's config.

    Raises ConfigError like `check_follower`, for initial weights that do not fit the target, and
    for packed rows or masked blocks that target or drafter cannot read.
    """
    target = start = check_follower(settings)
    if settings.initialise.path is not None:
        start = _check_start(settings)
    else:
        chosen_layers(settings, target)
    _check_embeddings(settings)
    packed = settings.objective.packed_tokens is not None
    blocks = settings.drafter.drafts == "blocks"
    if blocks and settings.drafter.k == 1:
        raise ConfigError("drafter.k = 1 with drafter.drafts = 'blocks'; give 2 or more")
    drafts = [start] if packed or blocks else []
    for config in (*drafts, *([target] if packed else [])):
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if kind is not None and not takes_positions(kind, config):
            raise ConfigError(
                f"a {config.model_type!r} model takes no positions, which packed rows and masked "
                "blocks need; give drafter.drafts=tokens objective.packed_tokens=null"
            )
    return target


def check_follower(settings: CausalDrafterRecipe | StateDrafterRecipe) -> PretrainedConfig:
    """Checks common to recipes for decoder-only targets; returns the target's config.

    Raises ConfigError for other targets, for more draftable tokens than the target's vocabulary
    has, and for an objective without weights.
    """
    target = check_target(settings.target)
    if target.is_encoder_decoder:
        raise ConfigError(
            f"target.path = {settings.target.path!r} is an encoder-decoder model, but this recipe "
            "is for decoder-only ones; start from recipes/seq2seq.yaml"
        )
    check_output_tokens(settings.drafter.output_tokens, vocabulary_size(target))
    weights = settings.objective.model_dump(include={"forward_kl", "total_variation"})
    if not any(weights.values()):
        raise ConfigError(
            f"objective: all of {', '.join(weights)} are 0, so nothing is learned; give one of "
            "them a weight"
        )
    return target


def _check_embeddings(settings: CausalDrafterRecipe) -> None:
    """Checks that training does not change embeddings that are not saved. Raises ConfigError."""
    if settings.drafter.embeddings == "own":
        return
    start, name = settings.initialise.path, "drafter.embeddings = 'target'"
    if {*settings.objective.frozen} != {"embeddings", "output"}:
        raise ConfigError(
            f"{name} needs frozen embeddings and output, but objective.frozen = "
            f"{list(settings.objective.frozen)}; give objective.frozen=[embeddings,output], or "
            "drafter.embeddings=own"
        )
    if start is not None and not lacks_embeddings(
        read_config(start, f"initialise.path = {start!r}")
    ):
        raise ConfigError(
            f"{name}, but initialise.path = {start!r} has its own embeddings; leave it out to "
            "start from the target's layers, or give drafter.embeddings=own"
        )


def _check_start(settings: CausalDrafterRecipe) -> PretrainedConfig:
    """Returns the config of `initialise.path`: decoder-only, with the target's tokens."""
    path, name = str(settings.initialise.path), f"initialise.path = {settings.initialise.path!r}"
    start = read_config(path, name)
    if start.is_encoder_decoder or not is_language_model(start):
        raise ConfigError(
            f"{name} is a {start.model_type!r} model, not a decoder-only language model; give one "
            "with the target's tokens"
        )
    check_tokenizers(settings.target, path, name)
    return start


def chosen_layers(settings: CausalDrafterRecipe, target: PretrainedConfig) -> list[int]:
    """Returns the target layers that the drafter is made of. Raises ConfigError for too many, and
    for layers that the target does not have."""
    how, count = settings.initialise.layers, settings.drafter.layers
    depth = target.get_text_config(decoder=True).num_hidden_layers
    if not isinstance(how, str):
        strays = [layer for layer in how if layer >= depth]
        if strays or not how:
            raise ConfigError(
                f"initialise.layers = {list(how)}: give layers of the target, 0 to {depth - 1}"
            )
        if "layers" in settings.drafter.model_fields_set and count != len(how):
            raise ConfigError(
                f"drafter.layers = {count}, but initialise.layers lists {len(how)}; leave "
                "drafter.layers out"
            )
        return list(how)
    if count > depth:
        raise ConfigError(
            f"drafter.layers = {count} is more than the target's {depth} layers, which the drafter "
            f"is made of; give {depth} or fewer"
        )
    return spread(count, depth)


def empty_drafter(settings: CausalDrafterRecipe, target: PretrainedConfig) -> PreTrainedModel:
    """Makes the drafter in its final shape with random weights from torch's default generator."""
    start, size = settings.initialise, target.get_text_config(decoder=True).vocab_size
    if start.path is not None:
        config = read_config(start.path, f"initialise.path = {start.path!r}")
        config.vocab_size = size
    else:
        config = shallow_config(target, chosen_layers(settings, target))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def start_drafter(settings: CausalDrafterRecipe, target: PreTrainedModel) -> PreTrainedModel:
    """Makes the initial drafter for training, in float32 on the CPU.

    Random weights come from torch's default generator. Raises ConfigError for unreadable weights.
    """
    path = settings.initialise.path
    if path is None:
        drafter = empty_drafter(settings, target.config)
        stem, taken = layer_stem(target), chosen_layers(settings, target.config)
        drafter.load_state_dict(take_layers(target.state_dict(), stem, taken))
    else:
        name, options = f"initialise.path = {path!r}", {"dtype": torch.float32}
        config = read_config(path, name)
        drafter = read_whole(AutoModelForCausalLM, path, name, config, target, False, **options)
        fit_vocabulary(drafter, target.get_output_embeddings().out_features)
    for entry in ("pard_token", "k", "draftable_tokens"):  # of an earlier training
        vars(drafter.config).pop(entry, None)
    drafter.config.target = settings.target.recorded()
    if settings.drafter.embeddings == "target":
        drafter.config.embeddings = "target"
    tokens = {name: getattr(target.generation_config, name, None) for name in SPECIAL_TOKENS}
    drafter.generation_config = GenerationConfig(**tokens)
    return drafter.eval()


@torch.no_grad()
def fit_vocabulary(model: PreTrainedModel, size: int) -> None:
    """Resizes embeddings and output to `size` rows: model families pad vocabularies differently.

    Removed rows belong to no token of the target; new rows are the mean of the others.
    """
    previous = model.get_input_embeddings().num_embeddings
    if previous == size:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight[previous:] = layer.weight[:previous].mean(0)


def freeze(drafter: PreTrainedModel, parts: Sequence[str]) -> None:
    """Excludes `embeddings`, `output` or both from training."""
    modules = {"embeddings": drafter.get_input_embeddings, "output": drafter.get_output_embeddings}
    for part in parts:
        modules[part]().requires_grad_(False)


@torch.no_grad()
def demote_undrafted(model: PreTrainedModel) -> int:
    """Makes sure that tokens outside the draftable ones are never the arg-max in other programs;
    returns how many there are.

    Their rows of the output projection were not trained, and would win now and then, which
    shortens the accepted drafts. Each row becomes the mean of the draftable tokens' rows. Its score
    is then the mean of their scores and never above the largest, so the arg-max is a trained token.
    An output that shares the embeddings becomes a separate matrix.
    """
    if getattr(model.config, "draftable_tokens", None) is None:
        return 0
    output = model.get_output_embeddings()
    draftable = draftable_tokens(model.config, output.out_features)
    others = torch.ones(output.out_features, dtype=torch.bool)
    others[draftable] = False
    separate = copy.deepcopy(output)
    for part in (separate.weight, separate.bias):
        if part is not None:
            part[others] = part[draftable].double().mean(0).to(part.dtype)
    model.set_output_embeddings(separate)
    model.config.tie_word_embeddings = False
    return int(others.sum())
