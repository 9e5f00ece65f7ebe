"""Drafters whose embeddings are their target's, and are not saved again.

A drafter made of a target's layers keeps its embeddings and output projection, which are most of
its weights: 28 of 35 million in two layers of SmolLM2-135M. With `embeddings: target` in its
config.json its folder holds all other weights. These are taken from the loaded target, whose memory
the drafter then shares, or read from the files of the target that its config.json names. Loaded, it
is an ordinary model; saved again (`drafttrain export`), it is whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from drafttrain.config.base import ConfigError
from drafttrain.models.weight_files import check_finite, read_weights


def lacks_embeddings(config: PretrainedConfig) -> bool:
    """Whether a drafter's folder holds no embeddings and no output projection."""
    return getattr(config, "embeddings", None) == "target"


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """What a folder is to hold of a model: all weights but the target's; None: all."""
    if not lacks_embeddings(model.config):
        return None
    theirs = set(_names(model))
    return {name: value for name, value in model.state_dict().items() if name not in theirs}


def read_whole(
    kind: Any,
    path: str | Path,
    name: str,
    config: PretrainedConfig,
    target: PreTrainedModel | None,
    shared: bool = True,
    place: str | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """A drafter; one whose folder, by its config.json, lacks embeddings is made whole.

    target: where they are taken from; shared, its modules become the drafter's, which must be of
    its type. None: they are read from the files of `place`, a folder or Hub name, or of the target
    that the drafter's config.json names. `name` is what messages call the drafter. Raises
    ConfigError where they cannot be read or have another shape, and for other weights that are
    missing.
    """
    if not lacks_embeddings(config):
        return read_weights(kind, path, name, **settings)
    drafter = read_weights(kind, path, name, _names, **settings)
    if target is None:
        _read_embeddings(drafter, name, place)
    else:
        _take_embeddings(drafter, target, shared, name)
    check_finite(_parts(drafter), f"{name}, with its target's embeddings")
    del drafter.config.embeddings
    return drafter


def _take_embeddings(
    drafter: PreTrainedModel, target: PreTrainedModel, shared: bool, name: str
) -> None:
    own, theirs = (tuple(one.get_input_embeddings().weight.shape) for one in (drafter, target))
    if own != theirs:
        raise ConfigError(
            f"{name} has embeddings of shape {own}, which are its target's, but those of the "
            f"target given are {theirs}; give the target that it was trained for"
        )
    if shared:
        drafter.set_input_embeddings(target.get_input_embeddings())
        drafter.set_output_embeddings(target.get_output_embeddings())
    else:
        _parts(drafter).load_state_dict(_parts(target).state_dict())


@torch.no_grad()
def _read_embeddings(drafter: PreTrainedModel, name: str, place: str | None) -> None:
    """From the target's files, by the names that they have there: target and drafter are of one
    architecture."""
    target = drafter.config.target if place is None else {"path": place}
    wanted = _names(drafter)
    tensors, tied = drafter.state_dict(), drafter.config.tie_word_embeddings
    try:
        for key in wanted[:1] if tied else wanted:  # of tied ones files hold the embeddings alone
            tensors[key].copy_(_read_tensor(target["path"], target.get("revision"), key))
        if tied:
            drafter.get_output_embeddings().weight = drafter.get_input_embeddings().weight
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{name} holds no embeddings: they are those of target {target.get('path')!r}, which "
            f"cannot be read ({reason}); give the target, or correct target.path in its config.json"
        ) from None


def _read_tensor(path: str, revision: str | None, key: str) -> Tensor:
    """One tensor of a model's files, alone."""
    file, folder = SAFE_WEIGHTS_NAME, Path(path).expanduser()
    local = folder / SAFE_WEIGHTS_INDEX_NAME
    index = str(local) if local.is_file() else None
    if not folder.is_dir():
        index = cached_file(
            path,
            SAFE_WEIGHTS_INDEX_NAME,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
        )
    if index is not None:
        file = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"][key]
    with safe_open(cached_file(path, file, revision=revision), framework="pt") as weights:
        return weights.get_tensor(key)


def _parts(model: PreTrainedModel) -> nn.Module:
    return nn.ModuleList([model.get_input_embeddings(), model.get_output_embeddings()])


def _names(model: PreTrainedModel) -> list[str]:
    """Of the weights of both: the embeddings' first."""
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    own = [[id(one) for one in part.parameters()] for part in parts]
    named = [(name, id(one)) for name, one in model.named_parameters(remove_duplicate=False)]
    return list(dict.fromkeys(name for ids in own for name, one in named if one in ids))
