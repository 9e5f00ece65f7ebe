"""What a causal drafter can be made of: settings of its recipe against the target's config.json."""

from __future__ import annotations

from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import CausalDrafterRecipe, FollowTargetConfig
from drafttrain.models.causal_drafter import chosen_layers
from drafttrain.models.drafters import check_tokenizers
from drafttrain.models.language_models import family_defaults
from drafttrain.models.loading import check_target, is_language_model, read_config
from drafttrain.models.target_embeddings import lacks_embeddings

LOSSES = FollowTargetConfig.model_fields.keys() - {"frozen", "packed_tokens"}
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
    if start.path is not None and start.model is not None:
        raise ConfigError(
            f"initialise.path = {start.path!r} and initialise.model are both given; leave one out"
        )
    if start.path is not None:
        _check_start(settings)
    elif start.model is not None:
        if family_defaults(start.model, "initialise.model").is_encoder_decoder:
            raise ConfigError(
                f"initialise.model.model_type = {start.model['model_type']!r} is an "
                "encoder-decoder; give a decoder-only family, such as llama"
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
    size, wanted = target.get_text_config(decoder=True).vocab_size, settings.drafter.output_tokens
    if wanted is not None and wanted > size:
        raise ConfigError(
            f"drafter.output_tokens = {wanted} is more than the target's {size} tokens; give "
            "fewer, or leave it out"
        )
    return target


def check_losses(objective: FollowTargetConfig) -> bool:
    """Whether divergences from the target's rows are asked for. Raises ConfigError where nothing
    is learned."""
    weights = objective.model_dump(include=LOSSES)
    if not any(weights.values()):
        raise ConfigError(
            f"objective: all of {', '.join(weights)} are 0, so nothing is learned; give one of "
            "them a weight"
        )
    return any(weight for name, weight in weights.items() if name != "cross_entropy")


def _check_objective(settings: CausalDrafterRecipe) -> None:
    """Whether something is learned, from what is asked for."""
    follows = check_losses(settings.objective)
    if settings.teacher.kind == "cached" and not follows:
        raise ConfigError(
            "teacher.kind = 'cached' counts for divergences from the target's rows, but "
            "objective.cross_entropy alone has a weight; leave it out, or give one, as "
            "objective.forward_kl=1"
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
    given = start.path is not None and lacks_embeddings(
        read_config(start.path, f"initialise.path = {start.path!r}")
    )
    if start.model is not None or (start.path is not None and not given):
        what = "initialise.path" if start.path is not None else "initialise.model"
        raise ConfigError(
            f"{name}, but {what} brings embeddings of its own; leave it out to start from the "
            "target's layers, or give drafter.embeddings=own"
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
