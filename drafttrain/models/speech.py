"""Models that write down speech: which there are, and which languages and tasks they know."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.models.languages import generation_settings

SPEECH_OPTIONS = {"language": "lang_to_id", "task": "task_to_id"}
"""What a speech model may be asked for, and where its generation_config says what it knows."""


def takes_audio(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration writes down speech: its inputs are audio."""
    return config.is_encoder_decoder and type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def check_speech(config: TargetConfig, model_config: PretrainedConfig) -> None:
    """Refuse speech models of unknown families, and languages and tasks that a target lacks.

    Beside config.json only generation_config.json is read. Raises ConfigError.
    """
    asked = {
        name: getattr(config, name) for name in SPEECH_OPTIONS if getattr(config, name) is not None
    }
    if not takes_audio(model_config):
        for name, value in asked.items():
            raise ConfigError(
                f"target.{name} = {value!r} is for speech targets, but {config.path!r} is a "
                f"{model_config.model_type!r} model; leave it out"
            )
        return
    if model_config.model_type != "whisper":
        raise ConfigError(
            f"target.path = {config.path!r} is a {model_config.model_type!r} model; of the models "
            "that write down speech Whisper's are known: give one"
        )
    try:
        set_language_and_task(generation_settings(config, model_config), config)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def set_language_and_task(settings: GenerationConfig, config: TargetConfig) -> None:
    """Put the language and the task that the user asks for into a target's generation_config, as
    `generate` does with its arguments. Raises ValueError for what the target does not know."""
    for name in SPEECH_OPTIONS:
        if (value := getattr(config, name)) is not None:
            setattr(settings, name, value)
    check_language_and_task(settings)


def check_language_and_task(settings: GenerationConfig) -> None:
    """Refuse a language or a task that a target of these settings does not know.

    Raises ValueError.
    """
    values = settings.to_dict()
    for name, table in SPEECH_OPTIONS.items():
        value, known = values.get(name), values.get(table)
        if value is None:
            continue
        if not values.get("is_multilingual", True) or not known:
            raise ValueError(
                f"target.{name} = {value!r}, but this target transcribes English alone; leave it "
                "out"
            )
        if name == "task" and value not in known:
            raise ValueError(
                f"target.task = {value!r} is no task of this target; use {' or '.join(known)}"
            )
        if name == "language":
            language_token(value, known)


def language_token(language: str, known: Mapping[str, int]) -> int:
    """The token of a language: `<|de|>`, `de` or `german`. Raises ValueError."""
    name = language.lower()
    for wanted in (name, f"<|{TO_LANGUAGE_CODE.get(name, name)}|>"):
        if wanted in known:
            return known[wanted]
    codes = ", ".join(sorted(token.strip("<|>") for token in known))
    raise ValueError(
        f"target.language = {language!r} is no language of this target; give one of: {codes}"
    )
