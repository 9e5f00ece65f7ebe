"""Source and target language of multilingual translation targets (NLLB, M2M100, mBART-50).

Their tokenizer marks a source with the token of its language, and `generate` forces the token of
the output's language as the first new token (`forced_bos_token_id`). For Whisper see speech.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig

CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")
"""Pattern of special tokens for languages: deu_Latn, de_DE."""
FIELDS = ("source_language", "target_language")


def language_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns a tokenizer's language tokens by language code; empty if it has none."""
    if not isinstance(getattr(type(tokenizer), "src_lang", None), property):
        return {}
    known = getattr(tokenizer, "lang_code_to_id", None)
    if known is None:  # NLLB has no table
        codes = filter(CODE.fullmatch, map(str, tokenizer.all_special_tokens))
        known = {code: tokenizer.convert_tokens_to_ids(code) for code in codes}
    return known


def generation_settings(config: TargetConfig, model_config: PretrainedConfig) -> GenerationConfig:
    """Reads a target's generation_config, or derives it from its config.json if there is none."""
    try:
        return GenerationConfig.from_pretrained(config.path, revision=config.revision)
    except (OSError, ValueError):
        return GenerationConfig.from_model_config(model_config)


def choose_languages(
    tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig, config: TargetConfig
) -> None:
    """Sets the source language of a target's tokenizer and the output language of its `generate`.

    The settings are `source_language` and `target_language`. Without them the target's files must
    name the languages: tokenizer_config.json that of sources; generation_config.json that of
    outputs, by `forced_bos_token_id` or `decoder_start_token_id`. Raises ConfigError if neither
    does, for codes that the tokenizer does not know, and for a target without languages.
    """
    known = language_tokens(tokenizer)
    source, output = (_checked(config, field, known) for field in FIELDS)
    if source is not None:
        tokenizer.src_lang = tokenizer.init_kwargs["src_lang"] = source
    elif known and tokenizer.init_kwargs.get("src_lang") is None:
        raise _missing(config, FIELDS[0], known)
    first = {settings.forced_bos_token_id, settings.decoder_start_token_id}
    if output is not None:
        settings.forced_bos_token_id = known[output]
    elif known and not first & {*known.values()}:
        raise _missing(config, FIELDS[1], known)


def _checked(config: TargetConfig, field: str, known: Mapping[str, int]) -> str | None:
    """Returns a language setting, None if it is not given. Raises ConfigError for unknown codes."""
    code = getattr(config, field)
    if code is not None and not known:
        raise ConfigError(
            f"target.{field} = {code!r} is for targets whose tokenizer marks languages (NLLB, "
            f"M2M100, mBART-50), which that of {config.path!r} does not; leave it out"
        )
    if code is not None and code not in known:
        raise ConfigError(
            f"target.{field} = {code!r} is not one of the {len(known)} languages of "
            f"{config.path!r}; did you mean {nearest(code, known)!r}?"
        )
    return code


def _missing(config: TargetConfig, field: str, known: Mapping[str, int]) -> ConfigError:
    return ConfigError(
        f"target.{field} is missing: {config.path!r} has {len(known)} languages, and its files do "
        f"not name one for its {'inputs' if field == FIELDS[0] else 'outputs'}; give a code, such "
        f"as target.{field}={next(iter(known))}"
    )


def nearest(code: str, known: Mapping[str, int]) -> str:
    """Returns the known code most similar to an unknown one: de_DE for de."""

    def similarity(other: str) -> tuple[bool, float]:
        given, candidate = code.lower(), other.lower()
        return candidate.startswith(given), SequenceMatcher(None, given, candidate).ratio()

    return max(known, key=similarity)
