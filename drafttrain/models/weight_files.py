"""Loads a model's weights: complete and finite, from safetensors in the model's own folder.

Pickles can run code when they are read, and a shard index could name any file on the disk; both are
refused before any file is opened. Transformers initialises missing weights randomly and ignores
unknown ones; both raise errors here.
"""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from drafttrain.config.base import ConfigError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that torch reads with pickle."""
OTHERS = (".gguf", ".onnx", ".msgpack", ".h5", ".ot")
"""Suffixes of weight files for other programs."""
WEIGHT_ERRORS = (OSError, ValueError, RuntimeError, EOFError, SafetensorError)
"""Errors that Transformers raises for missing or damaged weights."""


def read_weights(
    kind: Any,
    path: str | Path,
    name: str,
    lacks: Callable[[PreTrainedModel], Collection[str]] = lambda model: (),
    **settings: Any,
) -> Any:
    """Loads a complete model by `kind.from_pretrained`, by default from safetensors only.

    `name`: the model's name in messages. lacks: returns the names of weights that the files may
    leave out. Raises ConfigError.
    """
    options = {"use_safetensors": True, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # _check_complete reports them
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # else it warns about weights that `lacks` allows
    packages = f"{name}: its weights need a package that is not installed"
    install = "install it, or give the model without quantisation"
    convert = "complete safetensors are needed: copy them again, or use `drafttrain convert`"
    try:
        with (
            named_errors(f"{name}: its weights cannot be read", convert, WEIGHT_ERRORS),
            named_errors(packages, install, (ImportError,)),
        ):
            model, report = kind.from_pretrained(path, **options | settings)
    finally:
        logging.set_verbosity(verbosity)
    _check_complete(model, report, name, lacks(model))
    check_finite(model, name)
    return model


def _check_complete(
    model: PreTrainedModel, report: Mapping[str, Any], name: str, lacking: Collection[str]
) -> None:
    """Raises ConfigError for weights that are not in the files, and for weights of the files that
    are left out though the model would compute with them."""
    remedy = "copy the whole folder again, or save the model once with save_pretrained"
    unused = sorted(report["unexpected_keys"])
    unknown = f"; its files hold {unused[0]!r}, which the model does not have" if unused else ""
    if missing := sorted(set(report["missing_keys"]) - set(lacking)):
        raise ConfigError(
            f"{name}: its files lack {len(missing)} of {len(model.state_dict())} weights, such as "
            f"{missing[0]!r}{unknown}; {remedy}"
        )
    for key, shape, expected in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"{name}: {key!r} has shape {list(shape)} in its files, but {list(expected)} by its "
            f"config.json; {remedy}"
        )
    if computed := [key for key in unused if _computes_with(model, key)]:
        raise ConfigError(
            f"{name}: by its config.json it has no {computed[0]!r}, but its files hold it "
            f"({len(computed)} such weights); correct config.json, or {remedy}"
        )
    if unused:
        print(
            f"{name}: {len(unused)} weights in its files, such as {unused[0]!r}, are of parts that "
            f"a {type(model).__name__} does not have, and are ignored",
            file=sys.stderr,
        )


def _computes_with(model: nn.Module, key: str) -> bool:
    """Whether an unknown weight belongs to a part that the model has: a bias, or a further layer
    of a stack."""
    module, names = model, key.split(".")
    while names[0] in module._modules and len(names) > 1:
        module = module._modules[names.pop(0)]
        if module is None:
            return False
    return isinstance(module, nn.ModuleList) or (len(names) == 1 and names[0] in module._parameters)


@torch.no_grad()
def check_finite(model: nn.Module, name: str) -> None:
    """Raises ConfigError for NaN or infinity in a model's weights. `name`: its name in messages."""
    for key, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or not weight.numel():
            continue
        values = weight if weight.element_size() > 1 else weight.float()
        if not all(bound.isfinite() for bound in values.aminmax()):  # aminmax propagates NaN
            raise ConfigError(
                f"{name}: {key!r} holds NaN or infinity in {weight.dtype}; load the model in "
                "float32 or bfloat16 if its files are finite, else copy or train it again"
            )


def first_line(error: Exception) -> str:
    """Returns the first line of a library's error; the rest is its advice."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    kind = type(error).__name__
    if isinstance(error, LookupError | TypeError | AttributeError):
        first = f"{kind}: {first}"
    return first.rstrip(".") or kind


@contextmanager
def named_errors(
    what: str, remedy: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Converts a library's errors of these kinds to a ConfigError: `what (first line); remedy`."""
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise ConfigError(f"{what} ({first_line(error)}); {remedy}") from error


def check_weight_files(path: str, name: str, revision: str | None = None) -> None:
    """Refuses pickled weights, shards outside the folder, and incomplete safetensors files.

    `name`: the model's name in messages. Reads only names and headers. A folder without weights
    passes; reading it fails later. Raises ConfigError.
    """
    folder, files = Path(path), []
    if not folder.is_dir():
        try:
            shards_of(Path(cached_file(path, SAFE_WEIGHTS_INDEX_NAME, revision=revision)), name)
        except OSError:  # not sharded
            return
    elif (folder / SAFE_WEIGHTS_NAME).is_file():
        files = [SAFE_WEIGHTS_NAME]
    elif (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        files = sorted(set(shards_of(folder / SAFE_WEIGHTS_INDEX_NAME, name).values()))
    elif others := other_weights(folder):
        if others[0].endswith(PICKLES):
            raise ConfigError(
                f"{name} holds its weights in {others[0]}, a pickle, which can run code when it is "
                f"read; convert it: `drafttrain convert --model {folder} --out FOLDER`"
            )
        raise ConfigError(
            f"{name} holds its weights in {others[0]}, but safetensors are needed; give the folder "
            "of the Transformers model that it was made from"
        )
    for file in files:
        what = f"{name}: {file} is not a complete safetensors file"
        with (
            named_errors(what, "copy it again (with git: git lfs pull)", WEIGHT_ERRORS),
            safe_open(folder / file, framework="pt"),
        ):
            pass


def shards_of(index: Path, name: str, suffix: str = ".safetensors") -> dict[str, str]:
    """Returns the file of each weight of an index. Raises ConfigError for files elsewhere."""
    what = f"{name}: {index.name} is not a list of weight files"
    with named_errors(what, "save the model again with save_pretrained"):
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = set(file_of.values())
    for shard in sorted(shards, key=str):
        check_own_file(shard, name, index.name, suffix)
    return file_of


def check_own_file(file: object, name: str, named_by: str, suffix: str = ".safetensors") -> None:
    """Checks that a model's file names a weight file next to it. Raises ConfigError."""
    plain = isinstance(file, str) and Path(file).name == file and "\\" not in file
    if not (plain and file.endswith(suffix)):
        raise ConfigError(
            f"{name}: {named_by} names {file!r}, which is not a {suffix[1:]} file in the model's "
            "own folder; save the model again with save_pretrained"
        )


def other_weights(folder: Path) -> list[str]:
    """Returns the names of a folder's weight files in other formats, pickles first."""
    names = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES + OTHERS)
    return sorted(names, key=lambda name: not name.endswith(PICKLES))
