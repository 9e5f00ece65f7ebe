"""Causal drafters for decoder-only targets: ordinary language models, and how they are initialised.

config.json also names the target (`target`) and, for a drafter of a part of the vocabulary, its
tokens (`draftable_tokens`): drafttrain's engine then computes no other scores. Other programs load
the folder as a language model with the full vocabulary; export changes the other rows of its output
so that they never win (`demote_undrafted`).
"""

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
from drafttrain.config.recipes import CausalDrafterRecipe, StateDrafterRecipe
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
    """Checks the settings without reading weights; returns the target's config. Raises
    ConfigError."""
    target = check_follower(settings)
    start = _check_start(settings, target)
    packed = settings.objective.packed_tokens is not None
    blocks = settings.drafter.drafts == "blocks"
    if blocks and settings.drafter.k == 1:
        raise ConfigError("drafter.k = 1 with drafter.drafts = 'blocks'; give 2 or more")
    for config in [start] * (packed or blocks) + [target] * packed:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if kind is not None and not takes_positions(kind, config):
            raise ConfigError(
                f"a {config.model_type!r} model takes no positions, which packed rows and masked "
                "blocks need; give drafter.drafts=tokens objective.packed_tokens=null"
            )
    return target


def check_follower(settings: CausalDrafterRecipe | StateDrafterRecipe) -> PretrainedConfig:
    """Makes the checks common to recipes for decoder-only targets; returns the target's config.
    Raises ConfigError."""
    target = check_target(settings.target)
    if target.is_encoder_decoder:
        raise ConfigError(
            f"target.path = {settings.target.path!r} is an encoder-decoder model, but this recipe "
            "is for decoder-only ones; start from recipes/seq2seq.yaml"
        )
    check_output_tokens(settings.drafter.output_tokens, vocabulary_size(target))
    weights = settings.objective.model_dump(include={"forward_kl", "total_variation"})
    if not any(weights.values()):
        names = " and ".join(weights)
        raise ConfigError(f"objective: {names} are 0, so nothing is learned; give one a weight")
    return target


def _check_start(settings: CausalDrafterRecipe, target: PretrainedConfig) -> PretrainedConfig:
    """Checks the drafter's initial weights; returns the config of `initialise.path` or the target.

    Raises ConfigError for layers that the target does not have, for a model with an encoder or with
    other tokens, and if training would change embeddings that are not saved.
    """
    path, start, name = settings.initialise.path, target, "drafter.embeddings = 'target'"
    if path is None:
        chosen_layers(settings, target)
    else:
        start = _start_config(path)
        if start.is_encoder_decoder or not is_language_model(start):
            raise ConfigError(
                f"initialise.path = {path!r} is a {start.model_type!r} model, not a decoder-only "
                "language model; give one with the target's tokens"
            )
        check_tokenizers(settings.target, path, f"initialise.path = {path!r}")
    if settings.drafter.embeddings == "own":
        return start
    if {*settings.objective.frozen} != {"embeddings", "output"}:
        raise ConfigError(
            f"{name} needs objective.frozen=[embeddings,output], not "
            f"{list(settings.objective.frozen)}; give that, or drafter.embeddings=own"
        )
    if path is not None and not lacks_embeddings(start):
        raise ConfigError(
            f"{name}, but initialise.path = {path!r} has its own embeddings; leave it out to "
            "start from the target's layers, or give drafter.embeddings=own"
        )
    return start


def _start_config(path: str) -> PretrainedConfig:
    return read_config(path, f"initialise.path = {path!r}")


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
                f"drafter.layers = {count}, but initialise.layers lists {len(how)}; leave one out"
            )
        return list(how)
    if count > depth:
        raise ConfigError(
            f"drafter.layers = {count} is more than the target's {depth} layers; give fewer"
        )
    return spread(count, depth)


def empty_drafter(settings: CausalDrafterRecipe, target: PretrainedConfig) -> PreTrainedModel:
    """Makes the drafter in its final shape with random weights from torch's default generator."""
    if (path := settings.initialise.path) is not None:
        config = _start_config(path)
        config.vocab_size = target.get_text_config(decoder=True).vocab_size
    else:
        config = shallow_config(target, chosen_layers(settings, target))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def start_drafter(settings: CausalDrafterRecipe, target: PreTrainedModel) -> PreTrainedModel:
    """Makes the initial drafter for training, in float32 on the CPU. Raises ConfigError."""
    path = settings.initialise.path
    if path is None:
        drafter = empty_drafter(settings, target.config)
        stem, taken = layer_stem(target), chosen_layers(settings, target.config)
        drafter.load_state_dict(take_layers(target.state_dict(), stem, taken))
    else:
        name, options = f"initialise.path = {path!r}", {"dtype": torch.float32}
        start = _start_config(path)
        drafter = read_whole(AutoModelForCausalLM, path, name, start, target, False, **options)
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

    Their rows of the output projection, which were not trained, become the mean of the draftable
    tokens' rows: their score is then the mean of the others' and never above the largest. An output
    that shares the embeddings becomes a separate matrix.
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
