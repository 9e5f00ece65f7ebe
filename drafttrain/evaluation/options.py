"""How an evaluation decodes, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drafttrain.build.method import build_sampling
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.decoding.types import Sampling
from drafttrain.evaluation.report import TreeAxis

TIMING_REPEATS = 3
"""How often prompts are decoded to measure what calls cost."""


@dataclass(frozen=True)
class EvaluationOptions:
    """How to decode and how often."""

    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    seed: int = 0
    baselines: Sequence[Literal["generate", "beam"]] = ("generate", "beam")
    num_beams: int = 5
    repeats: int = 3
    warmup: int = 3
    bootstrap: int = 1000
    bleu_tokenizer: str = "13a"
    """sacrebleu's tokenizer: 13a, or zh, ja-mecab, ko-mecab, char, ... for such targets."""
    compared_by: TreeAxis | None = None
    """Where trees are compared: the size that those of a group share."""


def read_options(config: EvalConfig, compared_by: TreeAxis | None = None) -> EvaluationOptions:
    """The options that the settings of `drafttrain eval` hold."""
    return EvaluationOptions(
        sampling=build_sampling(config.decode.sampling),
        max_new_tokens=config.decode.sampling.max_new_tokens,
        seed=config.decode.sampling.seed,
        baselines=config.baselines,
        num_beams=config.num_beams,
        repeats=config.repeats,
        warmup=config.warmup,
        bootstrap=config.bootstrap,
        bleu_tokenizer=config.bleu_tokenizer,
        compared_by=compared_by,
    )


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
