"""A parallel drafter for a decoder-only target: a language model that fills in masks (PARD).

Its config.json has `pard_token`, the token that stands for a mask, as serving engines read it, and
`k`, the tokens that it was trained to draft in one call. Without masks it is an ordinary language
model, and whatever else loads the folder finds one.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError

PARD_K = 8
"""Tokens a call that the published PARD drafters were trained for."""


def check_blocks(config: PretrainedConfig, name: str) -> None:
    """Whether a config.json says how blocks are drafted; `name` is what messages call the drafter.

    Raises ConfigError for a mask that is no token, for a `k` that is missing or no number of
    tokens, and for a model with an encoder.
    """
    size, entries = config.get_text_config(decoder=True).vocab_size, vars(config)
    mask, k = entries.get("pard_token"), entries.get("k")
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{name} has pard_token = {mask!r}, but is an encoder-decoder model; parallel drafters "
            "are decoder-only: delete the entry from its config.json, and it drafts token by token"
        )
    if not isinstance(mask, int) or not 0 <= mask < size:
        raise ConfigError(
            f"{name} has pard_token = {mask!r}, which is none of its {size} tokens; correct its "
            "config.json, or delete the entry, and it drafts token by token"
        )
    if not isinstance(k, int) or k < 1:
        raise ConfigError(
            f"{name} has pard_token, but k = {k!r} is no number of tokens that it drafts in one "
            f'call; add "k": {PARD_K} to its config.json, or what it was trained for'
        )
