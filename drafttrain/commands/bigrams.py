"""Count which token follows which in a target's outputs, and write the table."""

from __future__ import annotations

from drafttrain.config.commands import BigramsConfig
from drafttrain.data.bigrams import write_bigrams


def bigrams(settings: BigramsConfig) -> None:
    """Write the table. Raises ConfigError where the outputs cannot be counted."""
    write_bigrams(settings)
