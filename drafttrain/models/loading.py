"""Load a target model and its tokenizer, with errors that say what to change.

Weights are read from safetensors only; Python code beside the weights runs only where the user
asked for it (`target.trust_remote_code`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.configuration_utils import PretrainedConfig

from drafttrain.config import ConfigError, TargetConfig
from drafttrain.models.layout import store_column_major


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to decode: weights on their device, in eval mode."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str
    """Where it was loaded from, as the user gave it."""


def load_target(config: TargetConfig) -> LoadedTarget:
    """Load an encoder-decoder target and its tokenizer.

    Raises ConfigError, before any weights are read, for a missing folder, a model that is no
    encoder-decoder, a missing tokenizer, or a device that is not there.
    """
    device = choose_device(config.device)
    check_seq2seq(config)
    tokenizer = _load_tokenizer(config)
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target.path = {config.path!r}: its weights cannot be read ({_first_line(error)}); "
            "safetensors are needed: save the model once with save_pretrained"
        ) from error
    model = model.to(device).eval()
    store_column_major(model)
    return LoadedTarget(model, tokenizer, config.path)


def check_seq2seq(config: TargetConfig) -> PretrainedConfig:
    """Refuse what is no encoder-decoder language model, from config.json alone.

    Returns the model's configuration. Raises ConfigError.
    """
    _check_path(config.path)
    try:
        model_config = AutoConfig.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target.path = {config.path!r}: no model configuration ({_first_line(error)}); "
            "give a local model folder or a name on the Hub"
        ) from error
    known = type(model_config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if not model_config.is_encoder_decoder or not (known or config.trust_remote_code):
        raise ConfigError(
            f"target.path = {config.path!r} is a {model_config.model_type!r} model, not an "
            "encoder-decoder language model; only those (T5, BART, Marian, ...) can be targets "
            "for now"
        )
    return model_config


def choose_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"target.device = {name!r} is no device; use auto, cpu, cuda or cuda:N"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"target.device = {name!r}, but this machine has {torch.cuda.device_count()} usable "
            "CUDA devices; use target.device=auto or cpu"
        )
    return device


def _check_path(path: str) -> None:
    """A folder that does not exist is told apart from a Hub name without asking the network."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"target.path = {path!r} holds no config.json; give the folder that "
                "save_pretrained wrote"
            )
        return
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists()
    if looks_local:
        raise ConfigError(f"target.path = {path!r}: no such folder; give an existing model folder")


def _load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise ConfigError(
            f"target.path = {config.path!r}: its tokenizer cannot be loaded "
            f"({_first_line(error)}); put the tokenizer's files beside the weights"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
