"""Speech recognition targets (Whisper): detection, languages and tasks."""

from transformers import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, GenerationConfig, PretrainedConfig
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.models.languages import generation_settings

SPEECH_OPTIONS = {"language": "lang_to_id", "task": "task_to_id"}
"""Options of a speech model, and the generation_config entry that lists the known values."""


def takes_audio(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration transcribes audio."""
    return config.is_encoder_decoder and type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def check_speech(config: TargetConfig, model_config: PretrainedConfig) -> None:
    """Refuses speech models other than Whisper, and languages and tasks that a target lacks.

    Reads only config.json and generation_config.json. Raises ConfigError.
    """
    if not takes_audio(model_config):
        for name in SPEECH_OPTIONS:
            if (value := getattr(config, name)) is not None:
                raise ConfigError(
                    f"target.{name} = {value!r} is for speech targets, but {config.path!r} is a "
                    f"{model_config.model_type!r} model; leave it out"
                )
        return
    if model_config.model_type != "whisper":
        raise ConfigError(
            f"target.path = {config.path!r} is a {model_config.model_type!r} model; of the speech "
            "recognition models only Whisper is supported: give one"
        )
    set_language_and_task(generation_settings(config, model_config), config)


def set_language_and_task(settings: GenerationConfig, config: TargetConfig) -> None:
    """Sets the language and task of the settings in a target's generation_config, as `generate`
    does with its arguments. Raises ConfigError for values that the target does not know."""
    for name in SPEECH_OPTIONS:
        if (value := getattr(config, name)) is not None:
            setattr(settings, name, value)
    check_language_and_task(settings)


def check_language_and_task(settings: GenerationConfig) -> None:
    """Raises ConfigError for a language or a task that is unknown to a target."""
    values = settings.to_dict()
    for name, table in SPEECH_OPTIONS.items():
        value, known = values.get(name), values.get(table)
        if value is None:
            continue
        if not values.get("is_multilingual", True) or not known:
            raise ConfigError(
                f"target.{name} = {value!r}, but this target transcribes only English; leave it out"
            )
        if name == "task" and value not in known:
            raise ConfigError(
                f"target.task = {value!r} is not a task of this target; use {' or '.join(known)}"
            )
        language = value.lower()  # <|de|>, de or german
        token = f"<|{TO_LANGUAGE_CODE.get(language, language)}|>"
        if name == "language" and known.keys().isdisjoint((language, token)):
            codes = ", ".join(sorted(token.strip("<|>") for token in known))
            raise ConfigError(
                f"target.language = {value!r} is not a language of this target; give one of: "
                f"{codes}"
            )
