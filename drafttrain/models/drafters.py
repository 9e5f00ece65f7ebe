"""Load a drafter's model: a Spec-Drafter, block heads or a language model, checked first."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig, check_same_target
from drafttrain.models.draft_states import state_size
from drafttrain.models.loading import (
    WEIGHT_ERRORS,
    LoadedTarget,
    auto_class,
    first_line,
    is_language_model,
    load_tokenizer,
    read_config,
    read_tokenizer,
    ready_to_decode,
)
from drafttrain.models.spec_drafter.config import SpecDrafterConfig
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.weight_files import check_weight_files


def read_drafter_settings(path: str) -> PretrainedConfig:
    """The drafter's config.json.

    Raises ConfigError where there is none, it is no drafter's, or its weights are no safetensors.
    """
    settings = read_config(path, f"drafter {path!r}")
    if not (drafts_blocks(settings) or is_language_model(settings)):
        raise ConfigError(
            f"drafter {path!r} is a {settings.model_type!r} model, which drafts nothing; give a "
            "Spec-Drafter, block heads or a language model"
        )
    check_weight_files(path, f"drafter {path!r}")
    return settings


def drafts_blocks(settings: PretrainedConfig) -> bool:
    """Whether it is a drafter of whole blocks, made for one target, and no language model."""
    return isinstance(settings, SpecDrafterConfig | BlockHeadsConfig)


def check_drafter(
    path: str, target_path: str, target_settings: PretrainedConfig
) -> PretrainedConfig:
    """The drafter's settings, fit for the target's, from both config.json alone.

    Raises ConfigError where there are none, where only one of the two has an encoder, or where
    their vocabularies, or the states that block heads read, differ in size.
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
    width = state_size(target_settings, "token")
    if isinstance(settings, BlockHeadsConfig) and settings.hidden_size != width:
        raise ConfigError(
            f"block heads {path!r} read {settings.hidden_size} numbers a token, but the last "
            f"hidden state of target {target_path!r} has {width}; train heads for this target, or "
            "give the target they were trained on"
        )
    return settings


def check_tokenizers(target: TargetConfig, drafter: str, name: str | None = None) -> None:
    """An id must be the same token in both, where the drafter has a tokenizer beside it.

    Tokens that only one of them knows do no harm; `name` is what messages call the drafter. Raises
    ConfigError naming the first difference.
    """
    name = name or f"drafter {drafter!r}"
    folder = Path(drafter)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return
    ours = load_tokenizer(target).get_vocab()
    theirs = read_tokenizer(drafter, name).get_vocab()
    tokens = {index: token for token, index in ours.items()}
    for token, index in sorted(theirs.items(), key=lambda entry: entry[1]):
        if tokens.get(index, token) != token:
            raise ConfigError(
                f"{name} and target {target.path!r} have different tokenizers: token {index} is "
                f"{token!r} ({len(theirs)} tokens) in the former but {tokens[index]!r} "
                f"({len(ours)} tokens) in the target's; give one of the target's family"
            )


def load_drafter(
    path: str | Path, settings: PretrainedConfig, like: LoadedTarget | None = None
) -> PreTrainedModel:
    """The drafter's model in eval mode, of the target's type and on its device.

    Without a target: on the CPU, in the type that its file holds. Raises ConfigError, also where
    block heads were trained on another target.
    """
    if like is not None and isinstance(settings, BlockHeadsConfig):
        check_same_target(settings, like.model, str(path))
    own = {SpecDrafterConfig: SpecDrafter, BlockHeadsConfig: BlockHeads}
    kind = own.get(type(settings)) or auto_class(settings)
    dtype = "auto" if like is None else like.model.dtype
    try:
        model = kind.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except WEIGHT_ERRORS as error:
        raise ConfigError(
            f"drafter {str(path)!r}: its weights cannot be read ({first_line(error)}); "
            "whole safetensors are needed: copy them again, or save the model once with "
            "save_pretrained"
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
    elif isinstance(drafter_settings, BlockHeadsConfig):
        if drafter_settings.is_encoder_decoder == encodes:
            return
        other = "a decoder-only" if encodes else "an encoder-decoder"
        raise ConfigError(
            f"drafter {drafter_name!r} holds block heads of {other} model, but target "
            f"{target_name!r} is {wanted} ({target_settings.model_type!r}); train heads for this "
            "target, or give the target they were trained on"
        )
    elif drafter_settings.is_encoder_decoder == encodes:
        return
    else:
        other = "a decoder-only" if encodes else "an encoder-decoder"
        found = f"{other} model ({drafter_settings.model_type!r})"
    raise ConfigError(
        f"drafter {drafter_name!r} is {found}, but target {target_name!r} is {wanted} "
        f"({target_settings.model_type!r}); give {wanted} with its vocabulary as drafter"
    )
