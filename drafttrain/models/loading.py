"""Load targets, tokenizers and drafters, with errors that say what to change.

Weights are read from safetensors only; Python code beside the weights runs only where the user
asked for it (`target.trust_remote_code`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
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
    """Load an encoder-decoder or decoder-only target and its tokenizer.

    Raises ConfigError, before any weights are read, for a missing folder, a model that is no
    language model, a missing tokenizer, or a device that is not there.
    """
    device = choose_device(config.device)
    model_config = check_target(config)
    tokenizer = load_tokenizer(config)
    try:
        model = auto_class(model_config).from_pretrained(
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
    return LoadedTarget(ready_to_decode(model, device), tokenizer, config.path)


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForSeq2SeqLM]:
    """What loads a language model of this configuration."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def ready_to_decode(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """The model in eval mode on a device, its weights laid out for small matrix products."""
    model = model.to(device).eval()
    store_column_major(model)
    return model


def check_target(config: TargetConfig) -> PretrainedConfig:
    """Refuse what is no encoder-decoder or decoder-only language model, from config.json alone.

    Returns the model's configuration. Raises ConfigError.
    """
    model_config = _read_config(config)
    if not (is_language_model(model_config) or config.trust_remote_code):
        raise ConfigError(
            f"target.path = {config.path!r} is a {model_config.model_type!r} model, not a language "
            "model that generates; give an encoder-decoder (T5, BART, Marian, ...) or decoder-only "
            "one (Llama, Qwen, GPT-2, ...)"
        )
    return model_config


def check_seq2seq(config: TargetConfig) -> PretrainedConfig:
    """Refuse what is no encoder-decoder language model, from config.json alone.

    For Spec-Drafters: they encode the source by themselves and start from a target's encoder and
    decoder. Returns the model's configuration. Raises ConfigError.
    """
    model_config = check_target(config)
    if not model_config.is_encoder_decoder:
        raise ConfigError(
            f"target.path = {config.path!r} is a {model_config.model_type!r} model, not an "
            "encoder-decoder language model; a Spec-Drafter starts from a target's encoder and "
            "decoder (T5, BART, Marian, ...)"
        )
    return model_config


def is_language_model(config: PretrainedConfig) -> bool:
    """Whether Transformers has a generating language model for this configuration."""
    if config.is_encoder_decoder:
        return type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def _read_config(config: TargetConfig) -> PretrainedConfig:
    _check_path(config.path)
    try:
        return AutoConfig.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target.path = {config.path!r}: no model configuration ({_first_line(error)}); "
            "give a local model folder or a name on the Hub"
        ) from error


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


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises ConfigError where there is none."""
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
