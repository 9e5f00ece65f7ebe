"""How an evaluation decodes, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.build.method import build_sampling
from drafttrain.config.commands import Baseline, Compile, EvalConfig
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
    baselines: Sequence[Baseline] = ("generate", "beam")
    num_beams: int = 5
    batch_sizes: Sequence[int] = (1,)
    """Most sequences at once, in rising order, 1 first."""
    wave_batches: int = 4
    """Batches of prompts, at least, that a job decodes in turn at larger batch sizes."""
    repeats: int = 3
    warmup: int = 3
    timing_prompts: int = 0
    """Of teacher-forced acceptance: prompts that are decoded to measure costs."""
    bootstrap: int = 1000
    bleu_tokenizer: str = "13a"
    """sacrebleu's tokenizer: 13a, or zh, ja-mecab, ko-mecab, char, ... for such targets."""
    compile: Compile = "off"
    """Whether calls of one sequence were compiled."""
    compared_by: TreeAxis | None = None
    """Where trees are compared: the size that those of a group share."""


def read_options(config: EvalConfig, compared_by: TreeAxis | None = None) -> EvaluationOptions:
    """The options that the settings of `drafttrain eval` hold."""
    own = ("baselines", "num_beams", "wave_batches", "repeats", "warmup", "bootstrap")
    own += ("timing_prompts", "bleu_tokenizer", "compile")
    return EvaluationOptions(
        **_decoding(config.decode.sampling),
        **{name: getattr(config, name) for name in own},
        batch_sizes=sorted({1, *config.batch_sizes}),
        compared_by=compared_by,
    )


def timing_options(sampling: SamplingConfig) -> EvaluationOptions:
    """Options for measuring what calls cost: no baselines, one input to warm up."""
    how = _decoding(sampling)
    return EvaluationOptions(**how, baselines=(), repeats=TIMING_REPEATS, warmup=1)


def _decoding(config: SamplingConfig) -> dict[str, Any]:
    limit, seed = config.max_new_tokens, config.seed
    return {"sampling": build_sampling(config), "max_new_tokens": limit, "seed": seed}
