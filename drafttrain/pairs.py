"""Load a target with a drafter for it, checked against each other before weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from drafttrain.config import ConfigError, TargetConfig
from drafttrain.decoding.architectures import check_configuration
from drafttrain.decoding.cached_model import CachedModel
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.spec_drafter import SpecDrafterDrafter
from drafttrain.decoding.types import Drafter
from drafttrain.models.drafter_config import SpecDrafterConfig
from drafttrain.models.loading import (
    LoadedTarget,
    auto_class,
    check_target,
    is_language_model,
    load_target,
    load_tokenizer,
    ready_to_decode,
)
from drafttrain.models.spec_drafter import SpecDrafter
from drafttrain.runs import PLAIN


@dataclass(frozen=True)
class Pair:
    """A target and a drafter for it, loaded."""

    target: LoadedTarget
    drafter: Drafter
    drafter_model: PreTrainedModel | None
    """None for plain decoding."""

    @property
    def parameter_ratio(self) -> float | None:
        """The drafter's parameters over the target's."""
        if self.drafter_model is None:
            return None
        return self.drafter_model.num_parameters() / self.target.model.num_parameters()


def load_pair(target: TargetConfig, drafter: str) -> Pair:
    """Target and drafter, checked against each other before the weights of either are read."""
    target_settings = check_target(target)
    check_configuration(target_settings)
    if drafter == PLAIN:
        return Pair(load_target(target), NoDrafter(), None)
    drafter_settings = read_drafter_settings(drafter)
    check_kinds(target.path, target_settings, drafter, drafter_settings)
    check_vocabularies(target.path, target_settings, drafter, drafter_settings)
    if not isinstance(drafter_settings, SpecDrafterConfig):
        check_configuration(drafter_settings)
        check_tokenizers(target, drafter)
    loaded = load_target(target)
    model = load_drafter(drafter, drafter_settings, loaded)
    if isinstance(model, SpecDrafter):
        return Pair(loaded, SpecDrafterDrafter(model), model)
    return Pair(loaded, CausalDrafter(CachedModel(model)), model)


def load_drafter(path: str, settings: PretrainedConfig, like: LoadedTarget) -> PreTrainedModel:
    """The drafter's model, of the target's type and on its device. Raises ConfigError."""
    kind = SpecDrafter if isinstance(settings, SpecDrafterConfig) else auto_class(settings)
    try:
        model = kind.from_pretrained(path, dtype=like.model.dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(
            f"drafter {path!r}: its weights cannot be read ({reason}); safetensors are needed: "
            "save the model once with save_pretrained"
        ) from error
    return ready_to_decode(model, like.model.device)


def read_drafter_settings(path: str) -> PretrainedConfig:
    """The drafter's config.json. Raises ConfigError where there is none or it is no drafter's."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"drafter {path!r} holds no config.json; give the final/ folder of a run, or "
            f"{PLAIN!r} for plain decoding"
        )
    if not folder.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ConfigError(
            f"drafter {path!r}: no such folder; give an existing one, a name on the Hub, or "
            f"{PLAIN!r} for plain decoding"
        )
    try:
        settings = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"drafter {path!r}: its settings cannot be read ({reason})") from error
    if not (isinstance(settings, SpecDrafterConfig) or is_language_model(settings)):
        raise ConfigError(
            f"drafter {path!r} is a {settings.model_type!r} model, which drafts nothing; give a "
            f"Spec-Drafter, a language model, or {PLAIN!r} for plain decoding"
        )
    return settings


def check_kinds(
    target_name: str,
    target_settings: PretrainedConfig,
    drafter_name: str,
    drafter_settings: PretrainedConfig,
) -> None:
    """Drafter and target must both have an encoder, or neither. Raises ConfigError."""
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


def check_vocabularies(
    target_name: str,
    target_settings: PretrainedConfig,
    drafter_name: str,
    drafter_settings: PretrainedConfig,
) -> None:
    """Drafter and target must share one vocabulary. Raises ConfigError with both sizes."""
    drafter_size = drafter_settings.get_text_config(decoder=True).vocab_size
    target_size = target_settings.get_text_config(decoder=True).vocab_size
    if drafter_size != target_size:
        raise ConfigError(
            f"drafter {drafter_name!r} has a vocabulary of {drafter_size} tokens but target "
            f"{target_name!r} has {target_size}; train a drafter for this target, or give the "
            "target that the drafter was trained for"
        )


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
