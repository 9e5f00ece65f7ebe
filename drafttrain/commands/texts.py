"""The inputs of `drafttrain generate`, where they are texts and no data set."""

from __future__ import annotations

import sys

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import GenerateConfig


def read_texts(given: list[str] | None, settings: GenerateConfig) -> list[str] | None:
    """Texts of --text or standard input; None where the inputs are settings.data.

    Raises ConfigError for both at once, for none, and for bytes that are no text.
    """
    if given and settings.data is not None:
        raise ConfigError("--text and --data are both given; give one of them")
    if given or settings.data is not None:
        return given or None
    if sys.stdin.isatty():
        raise ConfigError("no inputs; add --text TEXT, --data FILE, or pipe lines in")
    try:
        lines = [line.rstrip("\r\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is not {error.encoding}: {error.reason} at byte {error.start}; "
            "convert it with iconv"
        ) from None
    if not lines:
        raise ConfigError("standard input is empty; pipe one text a line, or use --text or --data")
    return lines
