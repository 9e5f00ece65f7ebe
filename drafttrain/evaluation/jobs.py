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

Decode = Callable[[Sequence[int], int], list[Output]]
"""(numbers of prompts, most sequences at once) -> an output for each, in order."""


@dataclass(frozen=True)
class Job:
    """A way to decode, and how it decodes prompts."""

    name: str
    way: str
    """What it is called in reports, without sizes: chain, rsd-s, ... of a method; plain; generate,
    beam or assisted."""
    decode: Decode
    """Where several prompts are given, `Output.seconds` is from when a sequence entered to its
    end; the time of a prompt given alone is taken by whoever asks."""
    method: Method | None = None
    """None: a baseline, which is another library's."""
    sizes: Sizes = field(default_factory=dict)
    """Of a baseline: what it goes by."""
    largest_batch: int | None = None
    """Most sequences that it decodes at once; None: any number."""

    def takes(self, batch_size: int) -> bool:
        """Whether it decodes so many sequences at once."""
        return self.largest_batch is None or batch_size <= self.largest_batch
