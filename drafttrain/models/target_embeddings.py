"""Drafters that share their target's embeddings and do not save them.

A drafter made of a target's layers keeps the target's embeddings and output projection, which are
most of its weights: 28 of 35 million for two layers of SmolLM2-135M. With `embeddings: target` in
its config.json, its folder holds all other weights only. The shared ones are taken from the loaded
target, whose memory the drafter then shares, or read from the files of the target named in its
config.json. Once loaded, the drafter is an ordinary model; `drafttrain export` saves all weights.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from drafttrain.config.base import ConfigError
from drafttrain.models.weight_files import (
    WEIGHT_ERRORS,
    check_finite,
    named_errors,
    read_weights,
    shards_of,
)


def lacks_embeddings(config: PretrainedConfig) -> bool:
    """Whether a drafter's folder leaves out embeddings and output projection."""
    return getattr(config, "embeddings", None) == "target"


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Returns the weights to save: all except the target's; None means all."""
    if not lacks_embeddings(model.config):
        return None
    left_out = set(_names(model))
    return {name: value for name, value in model.state_dict().items() if name not in left_out}


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
    `name`: the drafter's name in messages. Raises ConfigError.
    """
    if not lacks_embeddings(config):
        return read_weights(kind, path, name, **settings)
    drafter = read_weights(kind, path, name, _names, **settings)
    if target is None:
        _read_embeddings(drafter, name, embeddings_of)
    else:
        _take_embeddings(drafter, target, shared, name)
    check_finite(_parts(drafter), f"{name}, with its target's embeddings")
    del drafter.config.embeddings
    return drafter


def _take_embeddings(
    drafter: PreTrainedModel, target: PreTrainedModel, shared: bool, name: str
) -> None:
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


@torch.no_grad()
def _read_embeddings(drafter: PreTrainedModel, name: str, path: str | None) -> None:
    """Reads the embeddings from the target's files, where they have the same names."""
    target = drafter.config.target if path is None else {"path": path}
    keys = _names(drafter)
    tensors, tied = drafter.state_dict(), drafter.config.tie_word_embeddings
    prefix = f"{drafter.base_model_prefix}."
    what = f"{name} shares the embeddings of target {target.get('path')!r}, which cannot be read"
    remedy = "give the target, or correct target.path in its config.json"
    with named_errors(what, remedy, (*WEIGHT_ERRORS, KeyError)):
        for key in keys[:1] if tied else keys:  # files hold tied weights once, as embeddings
            tensors[key].copy_(_read_tensor(target["path"], target.get("revision"), key, prefix))
        if tied:
            drafter.get_output_embeddings().weight = drafter.get_input_embeddings().weight


def _read_tensor(path: str, revision: str | None, key: str, prefix: str) -> Tensor:
    """Reads a single tensor from a model's files, whose names may lack the prefix."""
    spellings, file = (key, key.removeprefix(prefix)), SAFE_WEIGHTS_NAME
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if (index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **options)) is not None:
        files = shards_of(Path(index), f"target {path!r}")
        file = files[next((one for one in spellings if one in files), key)]
    with safe_open(cached_file(path, file, revision=revision), framework="pt") as weights:
        names = weights.keys()
        return weights.get_tensor(next((one for one in spellings if one in names), key))


def _parts(model: PreTrainedModel) -> nn.Module:
    return nn.ModuleList([model.get_input_embeddings(), model.get_output_embeddings()])


def _names(model: PreTrainedModel) -> list[str]:
    """Returns the weight names of embeddings and output projection, the embeddings first."""
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    part_ids = [[id(one) for one in part.parameters()] for part in parts]
    named = [(name, id(one)) for name, one in model.named_parameters(remove_duplicate=False)]
    return list(dict.fromkeys(name for ids in part_ids for name, one in named if one in ids))
