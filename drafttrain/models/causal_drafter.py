"""A drafter for a decoder-only target: an ordinary language model, and what it starts from.

Its config.json also names the target (`target`) and, where it drafts a part of the vocabulary, the
tokens (`draftable_tokens`): our engine then works out no other scores. Whatever else loads the
folder finds a language model with all its rows, of which an export makes the others ones that never
win (`demote_undrafted`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import (
    CausalDrafterRecipe,
    FollowTargetConfig,
    StateDrafterRecipe,
)
from drafttrain.models.draftable import draftable_tokens
from drafttrain.models.drafters import check_tokenizers, vocabulary_size
from drafttrain.models.language_models import (
    SPECIAL_TOKENS,
    layer_stem,
    shallow_config,
    spread,
    take_layers,
)
from drafttrain.models.loading import check_target, is_language_model, read_config
from drafttrain.models.target_embeddings import lacks_embeddings, read_whole

LOSSES = FollowTargetConfig.model_fields.keys() - {"frozen", "packed_tokens"}
"""Weights of losses among the settings of the objective."""


def check_causal_recipe(settings: CausalDrafterRecipe) -> PretrainedConfig:
    """The target's config.json, once all is checked that is known without weights.

    Raises ConfigError as `check_follower`, and for starts that do not fit the target.
    """
    target = check_follower(settings)
    if settings.initialise.path is not None:
        _check_start(settings)
    else:
        chosen_layers(settings, target)
    weights = settings.objective.model_dump(include=LOSSES - {"cross_entropy"})
    if settings.teacher.kind == "cached" and not any(weights.values()):
        raise ConfigError(
            "teacher.kind = 'cached' counts for divergences from the target's rows, but "
            "objective.cross_entropy alone has a weight; leave it out, or give one, as "
            "objective.forward_kl=1"
        )
    _check_embeddings(settings)
    return target


def check_follower(settings: CausalDrafterRecipe | StateDrafterRecipe) -> PretrainedConfig:
    """The target's config.json, after what recipes of drafters for decoder-only targets check.

    Raises ConfigError for other targets, for more tokens to draft than they have, and for
    objectives that train nothing.
    """
    target, wanted = check_target(settings.target), settings.drafter.output_tokens
    if target.is_encoder_decoder:
        raise ConfigError(
            f"target.path = {settings.target.path!r} is an encoder-decoder model, but this recipe "
            "is for decoder-only ones; start from recipes/seq2seq.yaml"
        )
    if wanted is not None and wanted > (size := vocabulary_size(target)):
        raise ConfigError(
            f"drafter.output_tokens = {wanted} is more than the target's {size} tokens; give "
            "fewer, or leave it out"
        )
    weights = settings.objective.model_dump(include=LOSSES)
    if not any(weights.values()):
        raise ConfigError(
            f"objective: all of {', '.join(weights)} are 0, so nothing is learned; give one of "
            "them a weight"
        )
    return target


def _check_embeddings(settings: CausalDrafterRecipe) -> None:
    """Whether embeddings that are not saved stay the target's."""
    if settings.drafter.embeddings == "own":
        return
    start, name = settings.initialise.path, "drafter.embeddings = 'target'"
    if {*settings.objective.frozen} != {"embeddings", "output"}:
        raise ConfigError(
            f"{name} leaves them as they are, but objective.frozen = "
            f"{list(settings.objective.frozen)}; give objective.frozen=[embeddings,output], or "
            "drafter.embeddings=own"
        )
    if start is not None and not lacks_embeddings(
        read_config(start, f"initialise.path = {start!r}")
    ):
        raise ConfigError(
            f"{name}, but initialise.path brings embeddings of its own; leave it out to start from "
            "the target's layers, or give drafter.embeddings=own"
        )


def _check_start(settings: CausalDrafterRecipe) -> None:
    """Whether `initialise.path` is a decoder-only model of the target's tokens."""
    path, name = str(settings.initialise.path), f"initialise.path = {settings.initialise.path!r}"
    start = read_config(path, name)
    if start.is_encoder_decoder or not is_language_model(start):
        raise ConfigError(
            f"{name} is a {start.model_type!r} model, no decoder-only language model; give one "
            "with the target's tokens"
        )
    check_tokenizers(settings.target, path, name)


def chosen_layers(settings: CausalDrafterRecipe, target: PretrainedConfig) -> list[int]:
    """Which of the target's layers the drafter is made of. Raises ConfigError for too many, and for
    a layer that the target has not."""
    how, count = settings.initialise.layers, settings.drafter.layers
    depth = target.get_text_config(decoder=True).num_hidden_layers
    if not isinstance(how, str):
        strays = [layer for layer in how if layer >= depth]
        if strays or not how:
            raise ConfigError(
                f"initialise.layers = {list(how)}: give layers of the target's, 0 to {depth - 1}"
            )
        if "layers" in settings.drafter.model_fields_set and count != len(how):
            raise ConfigError(
                f"drafter.layers = {count}, but initialise.layers lists {len(how)}; leave "
                "drafter.layers out"
            )
        return list(how)
    if count > depth:
        raise ConfigError(
            f"drafter.layers = {count} is more than the target's {depth}, which the drafter is "
            "made of; ask for as many or fewer"
        )
    return spread(count, depth)


def empty_drafter(settings: CausalDrafterRecipe, target: PretrainedConfig) -> PreTrainedModel:
    """The drafter with random weights, drawn from torch's generator, of its final shape."""
    start, size = settings.initialise, target.get_text_config(decoder=True).vocab_size
    if start.path is not None:
        config = read_config(start.path, f"initialise.path = {start.path!r}")
        config.vocab_size = size
    else:
        config = shallow_config(target, chosen_layers(settings, target))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def start_drafter(settings: CausalDrafterRecipe, target: PreTrainedModel) -> PreTrainedModel:
    """The drafter as it is before training, in float32 on the CPU.

    Random weights are drawn from torch's generator. Raises ConfigError for weights that cannot be
    read.
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
    drafter.config.target = settings.target.recorded()
    if settings.drafter.embeddings == "target":
        drafter.config.embeddings = "target"
    tokens = {name: getattr(target.generation_config, name, None) for name in SPECIAL_TOKENS}
    drafter.generation_config = GenerationConfig(**tokens)
    return drafter.eval()


@torch.no_grad()
def fit_vocabulary(model: PreTrainedModel, size: int) -> None:
    """Give a model so many rows of embeddings and outputs: families pad them to other sizes.

    Rows that are cut are of no token of the target's; new ones are the mean of the others.
    """
    had = model.get_input_embeddings().num_embeddings
    if had == size:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight[had:] = layer.weight[:had].mean(0)


def freeze(drafter: PreTrainedModel, parts: Sequence[str]) -> None:
    """Leave these of embeddings and output out of training."""
    named = {"embeddings": drafter.get_input_embeddings, "output": drafter.get_output_embeddings}
    for part in parts:
        named[part]().requires_grad_(False)


@torch.no_grad()
def demote_undrafted(model: PreTrainedModel) -> int:
    """Let no token that a drafter does not draft win where all have scores; how many there are.

    Their rows of the output were left out of training, and win now and then: rounds in other
    programs are shorter than ours for it. Each becomes the mean of the drafted tokens' rows. Its
    score is the mean of theirs, which is never above the highest, so the likeliest token is one of
    those that were trained. An output that shares the embeddings gets a matrix of its own.
    """
    if getattr(model.config, "draftable_tokens", None) is None:
        return 0
    output = model.get_output_embeddings()
    drafted = draftable_tokens(model.config, output.out_features)
    others = torch.ones(output.out_features, dtype=torch.bool)
    others[drafted] = False
    own = copy.deepcopy(output)
    for part in (own.weight, own.bias):
        if part is not None:
            part[others] = part[drafted].double().mean(0).to(part.dtype)
    model.set_output_embeddings(own)
    model.config.tie_word_embeddings = False
    return int(others.sum())
