"""A model's weights: safetensors in its own folder, read whole, and finite.

Pickles can run code when they are read, and an index of shards could name any file of the disk;
both are refused by name, before anything is opened. Transformers gives random numbers to weights
that files lack, and leaves out those that a model has no place for; both are refused here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from drafttrain.config.base import ConfigError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that Torch would read with pickle."""
OTHERS = (".gguf", ".onnx", ".msgpack", ".h5", ".ot")
"""Suffixes of weights for other programs."""
WEIGHT_ERRORS = (OSError, ValueError, RuntimeError, EOFError, SafetensorError)
"""What Transformers raises for weights that are missing or damaged."""


def read_weights(
    kind: Any,
    path: str | Path,
    name: str,
    lacks: Callable[[PreTrainedModel], Collection[str]] = lambda model: (),
    **settings: Any,
) -> Any:
    """A whole model: `kind.from_pretrained(path, **settings)`, from safetensors unless told else.

    `name` is what messages call the model; lacks: names of the weights that its files leave out.
    Raises ConfigError for files that cannot be read, weights that they lack or hold in another
    shape (tied ones are there once), weights that the model leaves out, and NaN or infinity.
    """
    asked = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, report = kind.from_pretrained(path, **asked | settings)
    except ImportError as error:
        raise ConfigError(
            f"{name}: its weights need a package that is not there ({first_line(error)}); install "
            "it, or give the model as it was before it was quantised"
        ) from error
    except WEIGHT_ERRORS as error:
        raise ConfigError(
            f"{name}: its weights cannot be read ({first_line(error)}); whole safetensors are "
            "needed: copy them again, or make them of pickles with `drafttrain convert`"
        ) from error
    _check_complete(model, report, name, lacks(model))
    check_finite(model, name)
    return model


def _check_complete(
    model: PreTrainedModel, report: Mapping[str, Any], name: str, lacking: Collection[str]
) -> None:
    """Every weight came from the files, and every number of the files that the model computes with
    went into it. Raises ConfigError."""
    remedy = "copy the whole folder again, or save the model once with save_pretrained"
    unused = sorted(report["unexpected_keys"])
    held = f"; its files hold {unused[0]!r}, which the model has no place for" if unused else ""
    if missing := sorted(set(report["missing_keys"]) - set(lacking)):
        raise ConfigError(
            f"{name}: its files lack {len(missing)} of {len(model.state_dict())} weights, as "
            f"{missing[0]!r}{held}; {remedy}"
        )
    for key, found, wanted in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"{name}: {key!r} has shape {list(found)} in its files, but by its config.json "
            f"{list(wanted)}; {remedy}"
        )
    if computed := [key for key in unused if _computes_with(model, key)]:
        raise ConfigError(
            f"{name}: by its config.json it has no {computed[0]!r}, but its files hold it "
            f"({len(computed)} such weights); correct config.json, or {remedy}"
        )
    if unused:
        print(
            f"{name}: {len(unused)} weights in its files, as {unused[0]!r}, are of parts that a "
            f"{type(model).__name__} does not have, and are left out",
            file=sys.stderr,
        )


def _computes_with(model: nn.Module, key: str) -> bool:
    """Whether a weight that a model does not have is of a part that it has: a bias, or another
    layer of a stack."""
    module, names = model, key.split(".")
    while names[0] in module._modules and len(names) > 1:
        module = module._modules[names.pop(0)]
        if module is None:
            return False
    return isinstance(module, nn.ModuleList) or (len(names) == 1 and names[0] in module._parameters)


@torch.no_grad()
def check_finite(model: nn.Module, name: str) -> None:
    """Refuse NaN and infinity in a model's weights; `name` is what messages call it.

    One pass over the weights. Raises ConfigError.
    """
    for key, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or not weight.numel():
            continue
        whole = weight if weight.element_size() > 1 else weight.float()
        if not all(bound.isfinite() for bound in whole.aminmax()):  # both are NaN where one is
            raise ConfigError(
                f"{name}: {key!r} holds NaN or infinity in {weight.dtype}; load the model in "
                "float32 or bfloat16 if its files are finite, else copy or train it again"
            )


def first_line(error: Exception) -> str:
    """What a library's error says first; the rest is its advice."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    kind = type(error).__name__
    if isinstance(error, LookupError | TypeError | AttributeError):
        said = f"{kind}: {said}"
    return said.rstrip(".") or kind


def check_weight_files(path: str, name: str, revision: str | None = None) -> None:
    """Refuse pickled weights, shards that lie elsewhere, and files that are no whole safetensors.

    `name` is what messages call the model. Only names and headers are read; a folder without any
    weights passes: there is nothing to refuse until they are read. Raises ConfigError.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            _shards(Path(cached_file(path, SAFE_WEIGHTS_INDEX_NAME, revision=revision)), name)
        except OSError:  # not sharded
            return
    elif (folder / SAFE_WEIGHTS_NAME).is_file():
        _check_header(folder / SAFE_WEIGHTS_NAME, name)
    elif (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        for shard in _shards(folder / SAFE_WEIGHTS_INDEX_NAME, name):
            _check_header(folder / shard, name)
    else:
        _refuse_others(folder, name)


def _check_header(file: Path, name: str) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{name}: {file.name} is no whole safetensors file ({first_line(error)}); copy it "
            "again (with git: git lfs pull)"
        ) from None


def _shards(index: Path, name: str) -> list[str]:
    """The files that an index names, all in its own folder. Raises ConfigError."""
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name}: {index.name} is no list of weight files ({type(error).__name__}: {error}); "
            "save the model anew with save_pretrained"
        ) from None
    for shard in sorted(shards, key=str):
        plain = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not (plain and shard.endswith(".safetensors")):
            raise ConfigError(
                f"{name}: {index.name} names {shard!r}, which is no safetensors file in the "
                "model's own folder; save the model anew with save_pretrained"
            )
    return sorted(shards)


def other_weights(folder: Path) -> list[str]:
    """Names of the files in a folder that hold weights in another format than safetensors."""
    return sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES + OTHERS)


def _refuse_others(folder: Path, name: str) -> None:
    """Of a folder without safetensors of Transformers' names. Raises ConfigError."""
    others = other_weights(folder)
    if pickles := [one for one in others if one.endswith(PICKLES)]:
        raise ConfigError(
            f"{name} holds its weights in {pickles[0]}, a pickle, which can run code when it is "
            f"read; make safetensors of it: `drafttrain convert --model {folder} --out FOLDER`"
        )
    if others:
        raise ConfigError(
            f"{name} holds its weights in {others[0]}, but safetensors are read; give the folder "
            "of the Transformers model that it was made from"
        )
