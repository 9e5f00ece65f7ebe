"""Load a drafter's model: a Spec-Drafter or an ordinary language model, checked first."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from drafttrain.config import ConfigError, TargetConfig
from drafttrain.models.drafter_config import SpecDrafterConfig
from drafttrain.models.loading import (
    LoadedTarget,
    auto_class,
    is_language_model,
    load_tokenizer,
    ready_to_decode,
)
from drafttrain.models.spec_drafter import SpecDrafter


def read_drafter_settings(path: str) -> PretrainedConfig:
    """The drafter's config.json. Raises ConfigError where there is none or it is no drafter's."""
    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"drafter {path!r} holds no config.json; give the folder that save_pretrained wrote, "
            "or the final/ folder of a run"
        )
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists()
    if looks_local and not folder.is_dir():
        raise ConfigError(
            f"drafter {path!r}: no such folder; give an existing one or a name on the Hub"
        )
    try:
        settings = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"drafter {path!r}: its settings cannot be read ({_first_line(error)}); give a model "
            "folder or a name on the Hub"
        ) from error
    if not (isinstance(settings, SpecDrafterConfig) or is_language_model(settings)):
        raise ConfigError(
            f"drafter {path!r} is a {settings.model_type!r} model, which drafts nothing; give a "
            "Spec-Drafter or a language model"
        )
    return settings


def check_drafter(
    path: str, target_path: str, target_settings: PretrainedConfig
) -> PretrainedConfig:
    """The drafter's settings, fit for the target's, from both config.json alone.

    Raises ConfigError where there are none, where only one of the two has an encoder, or where
    their vocabularies differ in size.
    """
    settings = read_drafter_settings(path)
    _check_kinds(target_path, target_settings, path, settings)
    drafter_size = settings.get_text_config(decoder=True).vocab_size
    target_size = target_settings.get_text_config(decoder=True).vocab_size
    if drafter_size != target_size:
        raise ConfigError(
            f"drafter {path!r} has a vocabulary of {drafter_size} tokens but target "
            f"{target_path!r} has {target_size}; train a drafter for this target, or give the "
            "target that the drafter was trained for"
        )
    return settings


def check_tokenizers(target: TargetConfig, drafter: str) -> None:
    """An id must be the same token in both, where the drafter has a tokenizer beside it.

    Tokens that only one of them knows do no harm. Raises ConfigError naming the first difference.
    """
    folder = Path(drafter)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return
    ours = load_tokenizer(target).get_vocab()
    theirs = load_tokenizer(TargetConfig(path=drafter)).get_vocab()
    tokens = {index: token for token, index in ours.items()}
    for token, index in sorted(theirs.items(), key=lambda entry: entry[1]):
        if tokens.get(index, token) != token:
            raise ConfigError(
                f"drafter {drafter!r} and target {target.path!r} have different tokenizers: token "
                f"{index} is {token!r} ({len(theirs)} tokens) in the drafter's but "
                f"{tokens[index]!r} ({len(ours)} tokens) in the target's; give a drafter of the "
                "target's family"
            )


def load_drafter(
    path: str | Path, settings: PretrainedConfig, like: LoadedTarget | None = None
) -> PreTrainedModel:
    """The drafter's model in eval mode, of the target's type and on its device.

    Without a target: on the CPU, in the type that its file holds. Raises ConfigError.
    """
    kind = SpecDrafter if isinstance(settings, SpecDrafterConfig) else auto_class(settings)
    dtype = "auto" if like is None else like.model.dtype
    try:
        model = kind.from_pretrained(path, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"drafter {str(path)!r}: its weights cannot be read ({_first_line(error)}); "
            "safetensors are needed: save the model once with save_pretrained"
        ) from error
    return model.eval() if like is None else ready_to_decode(model, like.model.device)


def load_drafter_beside(target: LoadedTarget, path: str) -> PreTrainedModel:
    """A drafter for a loaded target, checked against it first. Raises ConfigError."""
    return load_drafter(path, check_drafter(path, target.path, target.model.config), target)


def _check_kinds(
    target_name: str,
    target_settings: PretrainedConfig,
    drafter_name: str,
    drafter_settings: PretrainedConfig,
) -> None:
    encodes = target_settings.is_encoder_decoder
    wanted = "an encoder-decoder model" if encodes else "a decoder-only model"
    if isinstance(drafter_settings, SpecDrafterConfig):
        if encodes:
            return
        found = "a Spec-Drafter, which reads a source of its own"
    elif drafter_settings.is_encoder_decoder == encodes:
        return
    else:
        other = "a decoder-only" if encodes else "an encoder-decoder"
        found = f"{other} model ({drafter_settings.model_type!r})"
    raise ConfigError(
        f"drafter {drafter_name!r} is {found}, but target {target_name!r} is {wanted} "
        f"({target_settings.model_type!r}); give {wanted} with its vocabulary as drafter"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
