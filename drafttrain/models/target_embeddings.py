"""Drafters that share their target's embeddings and do not save them.

A drafter made of a target's layers keeps the target's embeddings and output projection, which are
most of its weights: 28 of 35 million for two layers of SmolLM2-135M. With `embeddings: target` in
its config.json, its folder holds all other weights only. The shared ones are taken from the loaded
target, whose memory the drafter then shares, or read from the files of the target named in its
config.json. Once loaded, the drafter is an ordinary model; `drafttrain export` saves all weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.models.language_models import shallow_config
from drafttrain.models.weight_files import (
    WEIGHT_ERRORS,
    check_finite,
    check_weight_files,
    first_line,
    read_weights,
)


def lacks_embeddings(config: PretrainedConfig) -> bool:
    """Whether a drafter's folder leaves out embeddings and output projection."""
    return getattr(config, "embeddings", None) == "target"


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Returns the weights to save: all except the target's; None means all."""
    if not lacks_embeddings(model.config):
        return None
    shared = set(_names(model))
    return {name: value for name, value in model.state_dict().items() if name not in shared}


def read_whole(
    kind: Any,
    path: str | Path,
    name: str,
    config: PretrainedConfig,
    target: PreTrainedModel | None,
    shared: bool = True,
    embeddings_of: str | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Loads a drafter, with its target's embeddings if its folder leaves them out.

    target: model to take the embeddings from. If `shared`, its modules become the drafter's, which
    must have the same data type; else they are copied. None: they are read from the files of
    `embeddings_of`, a folder or Hub name, or of the target named in the drafter's config.json.
    `name`: the drafter's name in messages. Raises ConfigError for embeddings that cannot be read or
    have another shape, and for other missing weights.
    """
    if not lacks_embeddings(config):
        return read_weights(kind, path, name, **settings)
    drafter = read_weights(kind, path, name, _names, **settings)
    if target is None:
        target, shared = _read_embeddings(drafter, name, embeddings_of), True
    shape, given = (tuple(one.get_input_embeddings().weight.shape) for one in (drafter, target))
    if shape != given:
        raise ConfigError(
            f"{name} shares its target's embeddings, of shape {shape}, but those of the given "
            f"target have shape {given}; give the target that it was trained for"
        )
    if shared:
        drafter.set_input_embeddings(target.get_input_embeddings())
        drafter.set_output_embeddings(target.get_output_embeddings())
    else:
        _parts(drafter).load_state_dict(_parts(target).state_dict())
    check_finite(_parts(drafter), f"{name}, with its target's embeddings")
    del drafter.config.embeddings
    return drafter


def _read_embeddings(drafter: PreTrainedModel, name: str, path: str | None) -> PreTrainedModel:
    """Reads a target without its layers, in the drafter's data type."""
    target = drafter.config.target if path is None else {"path": path}
    path, revision = target["path"], target.get("revision")
    try:
        config = shallow_config(AutoConfig.from_pretrained(path, revision=revision), [])
        check_weight_files(path, f"target {path!r}", revision)
        model, report = type(drafter).from_pretrained(
            path,
            config=config,
            revision=revision,
            dtype=drafter.dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"its files lack {missing[0]!r}")
        return model
    except WEIGHT_ERRORS as error:
        raise ConfigError(
            f"{name} shares the embeddings of target {path!r}, which cannot be read "
            f"({first_line(error)}); give the target, or correct target.path in its config.json"
        ) from None


def _parts(model: PreTrainedModel) -> nn.Module:
    return nn.ModuleList([model.get_input_embeddings(), model.get_output_embeddings()])


def _names(model: PreTrainedModel) -> list[str]:
    """Returns the weight names of embeddings and output projection, the embeddings first."""
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    part_ids = [[id(one) for one in part.parameters()] for part in parts]
    named = [(name, id(one)) for name, one in model.named_parameters(remove_duplicate=False)]
    return list(dict.fromkeys(name for ids in part_ids for name, one in named if one in ids))
