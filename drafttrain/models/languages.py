"""Source and target language of multilingual translation targets (NLLB, M2M100, mBART-50).

Their tokenizer marks a source with the token of its language, and `generate` forces the token of
the output's language as the first new token (`forced_bos_token_id`). For Whisper see speech.py.
"""

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig

CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")
"""Pattern of special tokens for languages: deu_Latn, de_DE."""


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

    Without `source_language` and `target_language` the target's files must name the languages:
    tokenizer_config.json that of sources; generation_config.json that of outputs, by
    `forced_bos_token_id` or `decoder_start_token_id`. Raises ConfigError.
    """
    known = language_tokens(tokenizer)
    source, output = config.source_language, config.target_language
    first = {settings.forced_bos_token_id, settings.decoder_start_token_id}
    in_files = tokenizer.init_kwargs.get("src_lang") is not None
    _check_language(config, "source_language", "inputs", known, in_files)
    _check_language(config, "target_language", "outputs", known, bool(first & {*known.values()}))
    if source is not None:
        tokenizer.src_lang = tokenizer.init_kwargs["src_lang"] = source
    if output is not None:
        settings.forced_bos_token_id = known[output]


def _check_language(
    config: TargetConfig, field: str, texts: str, known: Mapping[str, int], in_files: bool
) -> None:
    """Checks a language setting. in_files: the target's files name a language for these texts."""
    code = getattr(config, field)
    if code is None and known and not in_files:
        raise ConfigError(
            f"target.{field} is missing: {config.path!r} has {len(known)} languages, and its files "
            f"name none for {texts}; give a code, such as target.{field}={next(iter(known))}"
        )
    if code is not None and not known:
        raise ConfigError(
            f"target.{field} = {code!r} is for targets whose tokenizer marks languages (NLLB, "
            f"M2M100, mBART-50), which that of {config.path!r} does not; leave it out"
        )
    if code is not None and code not in known:

        def similarity(other: str) -> tuple[bool, float]:
            """Prefers codes that begin with the given one: de_DE for de."""
            pair = code.lower(), other.lower()
            return pair[1].startswith(pair[0]), SequenceMatcher(None, *pair).ratio()

        raise ConfigError(
            f"target.{field} = {code!r} is not one of the {len(known)} languages of "
            f"{config.path!r}; did you mean {max(known, key=similarity)!r}?"
        )
