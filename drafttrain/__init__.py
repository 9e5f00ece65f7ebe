"""drafttrain: train, measure and serve drafters for speculative decoding.

decoder = drafttrain.load("TARGET", drafter="DRAFTER", k=8)
decoder.generate(["a text"], max_new_tokens=64)
"""

import os
from typing import Any

__version__ = "0.1.0"
__all__ = ["Generation", "SpeculativeDecoder", "load"]
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""OpenMP reads it when torch is loaded. By default threads spin while they wait for each other, and
two are then several hundred times slower than one where another program needs a core."""


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: commands and recipes start quicker."""
    if name not in __all__:
        raise AttributeError(f"module 'drafttrain' has no attribute {name!r}")
    from drafttrain.build import decoder

    return getattr(decoder, name)
