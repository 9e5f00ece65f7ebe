"""A drafter for a decoder-only target: an ordinary language model, and what it starts from.

Its config.json also names the target (`target`) and, where it drafts a part of the vocabulary, the
tokens (`draftable_tokens`): our engine then works out no other scores. Whatever else loads the
folder finds a language model with all its rows. With `prompt_layers` the target reads its prompts
(`prompts.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.language_recipes import CausalDrafterRecipe, FollowTargetConfig
from drafttrain.models.drafters import check_tokenizers, vocabulary_size
from drafttrain.models.identity import hash_target
from drafttrain.models.language_models import (
    family_defaults,
    layer_stem,
    random_model,
    spread,
    take_layers,
)
from drafttrain.models.loading import (
    LoadedTarget,
    check_target,
    is_language_model,
    read_config,
    read_tokenizer,
    read_weights,
)
from drafttrain.models.matched_tokens import Matches, adopt_tokens, match_tokens
from drafttrain.models.narrowed import (
    check_width,
    choose_directions,
    narrow_config,
    narrow_weights,
)
from drafttrain.models.prompts import check_prompt_layers, prompt_layers
from drafttrain.models.target_embeddings import (
    lacks_embeddings,
    leave_out_embeddings,
    read_whole,
)

SHARED = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Tokens that a drafter has from its target."""
LOSSES = FollowTargetConfig.model_fields.keys() - {"frozen", "packed_tokens", "lk_rate"}
"""Weights of losses among the settings of the objective."""


def check_causal_recipe(settings: CausalDrafterRecipe) -> PretrainedConfig:
    """The target's config.json, once all is checked that is known without weights.

    Raises ConfigError for targets that are not decoder-only, starts that contradict each other or
    do not fit the target, and for objectives that train nothing.
    """
    target = check_target(settings.target)
    if target.is_encoder_decoder:
        raise ConfigError(
            f"target.path = {settings.target.path!r} is an encoder-decoder model, but causal "
            "drafters are trained for decoder-only ones; use recipes/train_spec_drafter.py"
        )
    start, objective = settings.initialise, settings.objective
    reads_prompt = settings.drafter.prompt == "own"
    if start.path is not None and start.model is not None:
        raise ConfigError(
            f"initialise.path = {start.path!r} and initialise.model are both given; leave one out"
        )
    if start.width is not None:
        _check_width(settings, target)
    if start.path is None and start.vocabulary == "matched":
        raise ConfigError(
            "initialise.vocabulary = 'matched' is of the tokens of initialise.path, which is not "
            "given; give it, or leave both out"
        )
    if start.path is not None:
        _check_donor(settings, target)
    elif start.model is not None:
        if family_defaults(start.model, "initialise.model").is_encoder_decoder:
            raise ConfigError(
                f"initialise.model.model_type = {start.model['model_type']!r} is an "
                "encoder-decoder; give a decoder-only family, such as llama"
            )
        if not reads_prompt:
            raise ConfigError(
                "drafter.prompt = 'target' is of layers of the target, but initialise.model gives "
                "random weights; leave initialise.model out, or give drafter.prompt=own"
            )
        if objective.frozen:
            raise ConfigError(
                f"objective.frozen = {list(objective.frozen)} would leave random weights as they "
                "are (initialise.model); give objective.frozen=[]"
            )
    else:
        chosen_layers(settings, target)
    _check_objective(settings)
    _check_embeddings(settings)
    if settings.on_policy.share and not reads_prompt:
        raise ConfigError(
            f"on_policy.share = {settings.on_policy.share} continues rows that the drafter reads "
            "itself, but drafter.prompt = 'target'; leave on_policy out, or give drafter.prompt=own"
        )
    size, wanted = target.get_text_config(decoder=True).vocab_size, settings.drafter.output_tokens
    if wanted is not None and wanted > size:
        raise ConfigError(
            f"drafter.output_tokens = {wanted} is more than the target's {size} tokens; give "
            "fewer, or leave it out"
        )
    return target


def _check_width(settings: CausalDrafterRecipe, target: PretrainedConfig) -> None:
    """Whether the target's layers, and nothing else, can be projected down to that width."""
    start = settings.initialise
    for name, given in (("path", start.path), ("model", start.model)):
        if given is not None:
            raise ConfigError(
                f"initialise.width = {start.width} is of the target's layers, but "
                f"initialise.{name} gives another start; leave one of the two out"
            )
    if settings.drafter.prompt == "target":
        raise ConfigError(
            f"initialise.width = {start.width}: with drafter.prompt = 'target' the drafter goes on "
            "behind the target's own states; leave it out, or give drafter.prompt=own"
        )
    check_width(start.width, target)


def _check_objective(settings: CausalDrafterRecipe) -> None:
    """Whether something is learned, from what is asked for."""
    objective = settings.objective
    weights = objective.model_dump(include=LOSSES)
    if not any(weights.values()):
        raise ConfigError(
            f"objective: all of {', '.join(weights)} are 0, so nothing is learned; give one of "
            "them a weight"
        )
    follows = any(weight for name, weight in weights.items() if name != "cross_entropy")
    if settings.teacher.kind == "cached" and not follows:
        raise ConfigError(
            "teacher.kind = 'cached' counts for divergences from the target's rows, but "
            "objective.cross_entropy alone has a weight; leave it out, or give one, as "
            "objective.forward_kl=1"
        )
    if settings.on_policy.share and not follows:
        raise ConfigError(
            f"on_policy.share = {settings.on_policy.share}: drafts teach by divergences from the "
            "target's rows, but objective.cross_entropy alone has a weight; give one, as "
            "objective.forward_kl=1, or leave on_policy out"
        )


def _check_embeddings(settings: CausalDrafterRecipe) -> None:
    """Whether embeddings that are not saved stay the target's."""
    if settings.drafter.embeddings == "own":
        return
    start, name = settings.initialise, "drafter.embeddings = 'target'"
    if {*settings.objective.frozen} != {"embeddings", "output"}:
        raise ConfigError(
            f"{name} leaves them as they are, but objective.frozen = "
            f"{list(settings.objective.frozen)}; give objective.frozen=[embeddings,output], or "
            "drafter.embeddings=own"
        )
    given = (
        start.path is not None
        and start.vocabulary == "same"
        and lacks_embeddings(read_config(start.path, f"initialise.path = {start.path!r}"))
    )
    if start.model is not None or (start.path is not None and not given):
        what = "initialise.path" if start.path is not None else "initialise.model"
        raise ConfigError(
            f"{name}, but {what} brings embeddings of its own; leave it out to start from the "
            "target's layers, or give drafter.embeddings=own"
        )


def _check_donor(settings: CausalDrafterRecipe, target: PretrainedConfig) -> None:
    """Whether `initialise.path` is a decoder-only model of the target's tokens."""
    path, name = str(settings.initialise.path), f"initialise.path = {settings.initialise.path!r}"
    donor = read_config(path, name)
    if donor.is_encoder_decoder or not is_language_model(donor):
        raise ConfigError(
            f"{name} is a {donor.model_type!r} model, no decoder-only language model; give one "
            "with the target's tokens"
        )
    if settings.initialise.vocabulary == "matched":
        read_tokenizer(path, name)
    else:
        remedy = "give one of the target's family, or initialise.vocabulary=matched"
        check_tokenizers(settings.target, path, name, remedy)
    trained = "target" if prompt_layers(donor) else "own"
    if trained != settings.drafter.prompt:
        raise ConfigError(
            f"{name} was trained with drafter.prompt = {trained!r}, but drafter.prompt = "
            f"{settings.drafter.prompt!r} here; give drafter.prompt={trained}, or start from the "
            "target's layers"
        )
    check_prompt_layers(donor, target, name, f"target {settings.target.path!r}")


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
    if how == "even":
        return spread(count, depth)
    return list(range(count)) if how == "first" else list(range(depth - count, depth))


def shallow_config(target: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The target's config.json with these of its layers alone."""
    config = copy.deepcopy(target)
    if getattr(target, "layer_types", None) is not None:  # checked against the number of layers
        config.layer_types = [target.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    return config


def empty_drafter(settings: CausalDrafterRecipe, target: PretrainedConfig) -> PreTrainedModel:
    """The drafter with random weights, drawn from torch's generator, of its final shape."""
    start, size = settings.initialise, target.get_text_config(decoder=True).vocab_size
    if start.model is not None:
        fields = {"tie_word_embeddings": target.tie_word_embeddings} | start.model
        given = {name: getattr(target, name, None) for name in SHARED} | {"vocab_size": size}
        return random_model(AutoModelForCausalLM, fields, given, "initialise.model")
    if start.path is not None:
        config = read_config(start.path, f"initialise.path = {start.path!r}")
        config.vocab_size = size
    else:
        config = shallow_config(target, chosen_layers(settings, target))
        config = config if start.width is None else narrow_config(config, start.width)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def match_donor(settings: CausalDrafterRecipe, target: LoadedTarget) -> Matches | None:
    """The rows of `initialise.path` for the target's tokens, where they are to be matched."""
    start = settings.initialise
    if start.path is None or start.vocabulary == "same":
        return None
    name = f"initialise.path = {start.path!r}"
    donor, has = read_tokenizer(start.path, name), vocabulary_size(read_config(start.path, name))
    size = target.model.get_output_embeddings().out_features
    return match_tokens(target.tokenizer, donor, size, has)


@torch.no_grad()
def start_drafter(
    settings: CausalDrafterRecipe, target: PreTrainedModel, matches: Matches | None = None
) -> PreTrainedModel:
    """The drafter as it is before training, in float32 on the CPU.

    matches: of `match_donor`. Random weights are drawn from torch's generator. Raises ConfigError
    for weights that cannot be read.
    """
    start = settings.initialise
    if start.path is not None:
        name = f"initialise.path = {start.path!r}"
        if lacks_embeddings(read_config(start.path, name)):
            drafter = read_whole(
                AutoModelForCausalLM,
                start.path,
                name,
                target if matches is None else None,  # matched: those of the donor's own target
                shared=False,
                dtype=torch.float32,
            )
        else:
            drafter = read_weights(AutoModelForCausalLM, start.path, name, dtype=torch.float32)
        if matches is None:
            fit_vocabulary(drafter, target.get_output_embeddings().out_features)
        else:
            adopt_tokens(drafter, matches)
            forget_tokens(drafter.config, target.config)
    else:
        drafter = empty_drafter(settings, target.config)
    of_it = {"path": settings.target.path, "revision": settings.target.revision}
    if start.path is None and start.model is None:
        stem, taken = layer_stem(target), chosen_layers(settings, target.config)
        weights = take_layers(target.state_dict(), stem, taken)
        if start.width is not None:
            weights = narrow_weights(weights, choose_directions(target, start.width))
        drafter.load_state_dict(weights)
        if settings.drafter.prompt == "target":
            drafter.config.prompt_layers = taken
    if prompt_layers(drafter.config):
        of_it["weights_sha256"] = hash_target(target)
    drafter.config.target = of_it
    if settings.drafter.embeddings == "target":
        leave_out_embeddings(drafter, target)
    tokens = {name: getattr(target.generation_config, name, None) for name in SHARED}
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


def forget_tokens(drafter: PretrainedConfig, target: PretrainedConfig) -> None:
    """Let a drafter's config.json name tokens as the target's does, and none of its own."""
    for name in SHARED:
        setattr(drafter, name, getattr(target, name, None))
    for name in ("draftable_tokens", "pard_token"):
        vars(drafter).pop(name, None)


def freeze(drafter: PreTrainedModel, parts: Sequence[str]) -> None:
    """Leave these of embeddings and output out of training."""
    named = {"embeddings": drafter.get_input_embeddings, "output": drafter.get_output_embeddings}
    for part in parts:
        named[part]().requires_grad_(False)


def draftable_tokens(config: PretrainedConfig, vocabulary: int) -> Tensor | None:
    """The tokens that a drafter can draft, in rising order; None: all.

    Raises ConfigError where config.json holds no such list.
    """
    tokens = getattr(config, "draftable_tokens", None)
    if tokens is None:
        return None
    found = torch.tensor(tokens, dtype=torch.long)
    sound = len(found) > 0 and found[0] >= 0 and found[-1] < vocabulary
    if not sound or not (found[1:] > found[:-1]).all():
        raise ConfigError(
            f"draftable_tokens of {config._name_or_path!r} are no rising list of tokens below "
            f"{vocabulary}; delete them from its config.json, and it drafts all"
        )
    return found
