"""The ways to decode that are measured side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafttrain.build.method import Method
from drafttrain.build.sizes import Sizes
from drafttrain.decoding.types import Output

PLAIN = "plain"
GENERATE = "generate"
BEAM = "beam"
ASSISTED = "assisted"
CTRANSLATE2 = "ctranslate2"
INT8 = "ctranslate2-int8"

Decode = Callable[[Sequence[int], int], list[Output]]
"""(numbers of prompts, most sequences at once) -> an output for each, in order."""


@dataclass(frozen=True)
class Job:
    """A way to decode, and how it decodes prompts."""

    name: str
    way: str
    """What it is called in reports, without sizes: chain, rsd-s, ... of a method; plain; generate,
    beam, assisted, ctranslate2 or ctranslate2-int8."""
    decode: Decode
    """Where several prompts are given, `Output.seconds` is from when a sequence entered to its
    end; the time of a prompt given alone is taken by whoever asks."""
    method: Method | None = None
    """None: a baseline, which is another library's."""
    sizes: Sizes = field(default_factory=dict)
    """Of a baseline: what it goes by."""
    own_clock: bool = False
    """Whether it decodes in another process, which takes the time itself: `Output.seconds` is that
    of a batch of consecutive prompts."""
    own_memory: Callable[[Sequence[int], int], int | None] | None = None
    """As `decode`, but gives the peak bytes that this takes in its process, where they are known.
    None: it decodes in this process."""
    largest_batch: int | None = None
    """Most sequences that it decodes at once; None: any number."""

    def takes(self, batch_size: int) -> bool:
        """Whether it decodes so many sequences at once."""
        return self.largest_batch is None or batch_size <= self.largest_batch
