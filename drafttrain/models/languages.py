"""Targets that translate between many languages (NLLB, M2M100, mBART-50): which of them are meant.

Their tokenizer marks a source with the token of its language, and `generate` forces that of the
output's language as the first new token (`forced_bos_token_id`). For Whisper's languages see
speech.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig

CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")
"""A special token that is a language: deu_Latn, de_DE."""
FIELDS = ("source_language", "target_language")


def language_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The token of each language that a tokenizer marks sources with, by the language's code; empty
    for tokenizers that mark none."""
    if not isinstance(getattr(type(tokenizer), "src_lang", None), property):
        return {}
    known = getattr(tokenizer, "lang_code_to_id", None)
    if known is None:  # NLLB has no table
        codes = filter(CODE.fullmatch, map(str, tokenizer.all_special_tokens))
        known = {code: tokenizer.convert_tokens_to_ids(code) for code in codes}
    return known


def generation_settings(config: TargetConfig, model_config: PretrainedConfig) -> GenerationConfig:
    """A target's generation_config, from its files alone."""
    try:
        return GenerationConfig.from_pretrained(config.path, revision=config.revision)
    except (OSError, ValueError):
        return GenerationConfig.from_model_config(model_config)


def choose_languages(
    tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig, config: TargetConfig
) -> None:
    """Lets a target's tokenizer mark sources with `source_language`, and its `generate` begin with
    the token of `target_language`.

    Raises ConfigError for codes that the tokenizer does not know, for languages of a target that
    has none, and where neither the user nor the target's files name one: tokenizer_config.json
    that of the sources, generation_config.json that of outputs, by the token that it forces first
    or the one that the decoder starts from.
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
    """A language of the settings. Raises ConfigError for one that is not known."""
    code = getattr(config, field)
    if code is not None and not known:
        raise ConfigError(
            f"target.{field} = {code!r} is for targets whose tokenizer marks languages (NLLB, "
            f"M2M100, mBART-50), which that of {config.path!r} does not; leave it out"
        )
    if code is not None and code not in known:
        raise ConfigError(
            f"target.{field} = {code!r} is none of the {len(known)} languages of {config.path!r}; "
            f"did you mean {nearest(code, known)!r}?"
        )
    return code


def _missing(config: TargetConfig, field: str, known: Mapping[str, int]) -> ConfigError:
    return ConfigError(
        f"target.{field} is missing: {config.path!r} has {len(known)} languages, and its files "
        f"name none for its {'inputs' if field == FIELDS[0] else 'outputs'}; give a code, as "
        f"target.{field}={next(iter(known))}"
    )


def nearest(code: str, known: Mapping[str, int]) -> str:
    """The known code that is most like one that is not: de_DE for de."""

    def likeness(other: str) -> tuple[bool, float]:
        ours, theirs = code.lower(), other.lower()
        return theirs.startswith(ours), SequenceMatcher(None, ours, theirs).ratio()

    return max(known, key=likeness)
