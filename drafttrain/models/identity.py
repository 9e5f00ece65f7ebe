"""Identity of models and tokenizers: hashes of their content, independent of name and location."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.kinds import kind_of

HASHED_TYPES = ("float32", "bfloat16", "float16")
"""Data types of recorded hashes: a target may decode in another type than in training."""


def hash_weights(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """SHA-256 of the names and bytes of all weights; the same for a folder and for the Hub.

    Depends on the data type. With `dtype`, floating-point weights are hashed as if loaded in it.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the files that the tokenizer saves, without paths, padding and truncation."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if not path.is_file() or path.name == "tokenizer_config.json":
                continue
            content = path.read_bytes()
            if path.name == "tokenizer.json":
                state = json.loads(content)
                kept = {k: v for k, v in state.items() if k not in ("padding", "truncation")}
                content = json.dumps(kept, sort_keys=True).encode()
            digest.update(path.name.encode() + content)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    digest.update(json.dumps(special, sort_keys=True).encode())
    return digest.hexdigest()


def hash_target(target: nn.Module) -> dict[str, str]:
    """SHA-256 of the target's weights as if loaded in each of `HASHED_TYPES`."""
    return {name: hash_weights(target, getattr(torch, name)) for name in HASHED_TYPES}


def check_same_target(drafter: PretrainedConfig, target: PreTrainedModel, name: str) -> None:
    """Checks that a drafter which reads target states was trained on this target's weights.

    Raises ConfigError if it was not, or if its config.json holds no hash.
    """
    kind = kind_of(drafter)
    trained_on = getattr(drafter, "target", None) or {}
    expected = trained_on.get("weights_sha256")
    if not isinstance(expected, dict) or not expected:
        raise ConfigError(
            f"{name!r} ({kind.words}) does not say which target it was trained on, whose states it "
            "reads; train it again"
        )
    dtype = str(target.dtype).removeprefix("torch.")
    # the target's own data type first: usually it matches, and hashing is slow
    types = sorted(expected.keys() & set(HASHED_TYPES), key=lambda name: name != dtype)
    if all(hash_weights(target, getattr(torch, name)) != expected[name] for name in types):
        raise ConfigError(
            f"{name!r} ({kind.words}) was trained on target {trained_on.get('path')!r} with other "
            "weights than the given target, whose states it reads; give that, or train it again"
        )


class ModelIdentity(Config):
    """Identity of a model; the path is recorded as the user gave it."""

    path: str
    weights_sha256: str
    """Hash of the weights in the data type they were loaded in."""
    model_type: str

    @staticmethod
    def of(path: str, model: PreTrainedModel) -> ModelIdentity:
        """Computes the identity of a loaded model."""
        return ModelIdentity(
            path=path, weights_sha256=hash_weights(model), model_type=model.config.model_type
        )
