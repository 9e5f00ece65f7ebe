"""drafttrain: train, measure and serve drafters for speculative decoding.

decoder = drafttrain.load("TARGET", drafter="DRAFTER", k=8)
decoder.generate(["a text"], max_new_tokens=64)
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Generation", "SpeculativeDecoder", "load"]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: commands and recipes start quicker."""
    if name not in __all__:
        raise AttributeError(f"module 'drafttrain' has no attribute {name!r}")
    from drafttrain.build import decoder

    return getattr(decoder, name)
