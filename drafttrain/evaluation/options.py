"""How an evaluation decodes, and how often; a job is one way to decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafttrain.build.method import Method, build_sampling
from drafttrain.build.sizes import Sizes
from drafttrain.config.commands import Baseline, Compile, EvalConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.decoding.types import Output, Sampling

PLAIN = "plain"
GENERATE = "generate"
BEAM = "beam"
ASSISTED = "assisted"

Decode = Callable[[Sequence[int], int], list[Output]]
"""(indices of prompts, batch size) -> an output for each, in order."""


@dataclass(frozen=True)
class Job:
    """A way to decode, and its decoding of prompts."""

    name: str
    way: str
    """Its name in reports, without sizes: chain, rsd-s, ... of a method; plain; generate, beam or
    assisted."""
    decode: Decode
    """`Output.seconds` of a prompt in a batch is from when its sequence entered to its end; the
    caller times a prompt decoded alone."""
    method: Method | None = None
    """None: a baseline, which is Transformers' own."""
    sizes: Sizes = field(default_factory=dict)
    """Of a baseline: beams, k."""
    largest_batch: int | None = None
    """Largest batch size that it takes; None: any."""

    def takes(self, batch_size: int) -> bool:
        """Whether it decodes at this batch size."""
        return self.largest_batch is None or batch_size <= self.largest_batch


@dataclass(frozen=True)
class EvaluationOptions:
    """How to decode and how often."""

    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    seed: int = 0
    baselines: Sequence[Baseline] = ("generate", "beam")
    num_beams: int = 5
    batch_sizes: Sequence[int] = (1,)
    """In rising order, 1 first."""
    wave_batches: int = 4
    """Batches of prompts, at least, that a job decodes in turn at larger batch sizes."""
    repeats: int = 3
    warmup: int = 3
    bootstrap: int = 1000
    bleu_tokenizer: str = "13a"
    """sacrebleu's tokenizer: 13a, or zh, ja-mecab, ko-mecab, char, ... for such targets."""
    compile: Compile = "off"
    """Whether calls of one sequence were compiled."""


def read_options(config: EvalConfig) -> EvaluationOptions:
    """The options in the settings of `drafttrain eval`."""
    own = ("baselines", "num_beams", "wave_batches", "repeats", "warmup", "bootstrap")
    own += ("bleu_tokenizer", "compile")
    sampling = config.decode.sampling
    return EvaluationOptions(
        sampling=build_sampling(sampling),
        max_new_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        **{name: getattr(config, name) for name in own},
        batch_sizes=sorted({1, *config.batch_sizes}),
    )


TIMING_REPEATS = 3
"""Decodings of a prompt to measure what calls cost."""


def timing_options(sampling: SamplingConfig) -> EvaluationOptions:
    """Options for measuring what calls cost: no baselines, one input to warm up."""
    return EvaluationOptions(
        sampling=build_sampling(sampling),
        max_new_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        baselines=(),
        repeats=TIMING_REPEATS,
        warmup=1,
    )
