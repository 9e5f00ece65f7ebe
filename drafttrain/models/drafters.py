"""Load a drafter's model beside its target: an ordinary language model, or a Spec-Drafter."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)

from drafttrain.config import ConfigError
from drafttrain.models.drafter_config import SpecDrafterConfig
from drafttrain.models.loading import LoadedTarget, is_language_model, ready_to_decode
from drafttrain.models.spec_drafter import SpecDrafter


def check_drafter(
    path: str, target_path: str, target_settings: PretrainedConfig
) -> PretrainedConfig:
    """The drafter's configuration, from config.json alone.

    Raises ConfigError where there is none, it is no drafter's, or it does not fit the target.
    """
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists()
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(
            f"drafter = {path!r} holds no config.json; give the folder that save_pretrained "
            "wrote, or the final/ folder of a run"
        )
    try:
        settings = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"drafter = {path!r}: its settings cannot be read ({reason})") from error
    if not isinstance(settings, SpecDrafterConfig) and not is_language_model(settings):
        raise ConfigError(
            f"drafter = {path!r} is a {settings.model_type!r} model, which drafts nothing; give a "
            "Spec-Drafter or a language model (decoder-only or encoder-decoder)"
        )
    if settings.is_encoder_decoder != target_settings.is_encoder_decoder:
        kinds = {True: "an encoder-decoder", False: "a decoder-only"}
        raise ConfigError(
            f"drafter {path!r} is {kinds[settings.is_encoder_decoder]} model but target "
            f"{target_path!r} is {kinds[target_settings.is_encoder_decoder]} model; give a drafter "
            "of the target's kind"
        )
    drafter_size, target_size = settings.vocab_size, target_settings.vocab_size
    if drafter_size != target_size:
        raise ConfigError(
            f"drafter {path!r} has a vocabulary of {drafter_size} tokens but target "
            f"{target_path!r} has {target_size}; train a drafter for this target, or give the "
            "target that the drafter was trained for"
        )
    return settings


def load_drafter_model(path: str, like: LoadedTarget) -> PreTrainedModel:
    """The drafter's model in the target's type and on its device, checked against it first."""
    settings = check_drafter(path, like.path, like.model.config)
    kind = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
    if isinstance(settings, SpecDrafterConfig):
        kind = SpecDrafter
    try:
        model = kind.from_pretrained(path, dtype=like.model.dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(
            f"drafter = {path!r}: its weights cannot be read ({reason}); safetensors are needed"
        ) from error
    return ready_to_decode(model, like.model.device)
