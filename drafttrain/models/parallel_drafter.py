"""A parallel drafter for a decoder-only target: a language model that fills in masks (PARD).

Its config.json has `pard_token`, the id of the mask token under the name serving engines read, and
`k`, the number of tokens it was trained to draft in one forward pass. Without masks it is an
ordinary language model, and other programs load it as one.
"""

from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError

PARD_K = 8
"""Tokens per forward pass that the published PARD drafters were trained for."""


def check_blocks(config: PretrainedConfig, name: str) -> None:
    """Raises ConfigError for wrong entries in a parallel drafter's config.json. `name`: the
    drafter's name in messages."""
    size, entries = config.get_text_config(decoder=True).vocab_size, vars(config)
    mask, k = entries.get("pard_token"), entries.get("k")
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{name} has pard_token = {mask!r}, but is an encoder-decoder model; parallel drafters "
            "are decoder-only: delete the entry from its config.json to draft token by token"
        )
    if not isinstance(mask, int) or not 0 <= mask < size:
        raise ConfigError(
            f"{name} has pard_token = {mask!r}, which is not one of its {size} tokens; correct its "
            "config.json, or delete the entry to draft token by token"
        )
    if not isinstance(k, int) or k < 1:
        raise ConfigError(
            f"{name} has pard_token, but k = {k!r} is not a number of tokens to draft in one "
            f'forward pass; add "k": {PARD_K} to its config.json, or the k it was trained with'
        )
