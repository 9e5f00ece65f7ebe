"""Which files a model's weights may be read from: safetensors, in the model's own folder.

Pickles can run code when they are read, and an index of shards could name any file of the disk;
both are refused by name, before anything is opened.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from drafttrain.config.base import ConfigError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that Torch would read with pickle."""


def check_weight_files(path: str, name: str, revision: str | None = None) -> None:
    """Refuse pickled weights and shards that lie elsewhere, by the names of the files alone.

    `name` is what messages call the model. A folder without any weights passes: there is nothing to
    refuse until they are read. Raises ConfigError.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and (folder / SAFE_WEIGHTS_NAME).is_file():
        return
    try:
        index = Path(cached_file(path, SAFE_WEIGHTS_INDEX_NAME, revision=revision))
    except OSError:  # not sharded
        if folder.is_dir():
            _refuse_pickles(folder, name)
    else:
        _check_index(index, name)


def _check_index(index: Path, name: str) -> None:
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


def _refuse_pickles(folder: Path, name: str) -> None:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{name} holds its weights in {pickles[0]}, a pickle, which can run code when it is "
            "read; safetensors are needed: load it where you trust it and save it with "
            "save_pretrained"
        )
