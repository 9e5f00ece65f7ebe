"""What an evaluation decodes, and how: prompts and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from drafttrain.build.method import build_sampling
from drafttrain.config.commands import Baseline, Compile, EvalConfig
from drafttrain.data.inputs.clips import AUDIO, SECONDS, hear
from drafttrain.data.inputs.rows import CHATS, tokenize_prompts
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.loading import LoadedTarget

PLAIN = "plain"
GENERATE = "generate"
BEAM = "beam"
ASSISTED = "assisted"


@dataclass(frozen=True)
class Prompt:
    """One input row, tokenised."""

    row: int
    """Number of the row in the original file, from 0."""
    text: str
    reference: str | None
    source: Source
    chat: bool = False
    """Whether it is turns of a chat, not one text."""
    seconds: float | None = None
    """Length of a clip; text is its name."""


@dataclass(frozen=True)
class Skipped:
    """An input row that cannot be decoded."""

    row: int
    reason: str


def read_prompts(
    target: LoadedTarget, model: CachedModel, rows: Dataset
) -> tuple[list[Prompt], list[Skipped]]:
    """Tokenise the rows of `load_inputs`, texts or chats; those that do not fit are set aside.
    Clips are turned into features, and all fit.

    Raises ConfigError for chats without a template, ValueError where no row is left.
    """
    if AUDIO in rows.column_names:
        clips = [(row, hear(target, row)) for row in rows]
        return [
            Prompt(row["row"], row["source"], row["reference"], source, seconds=row[SECONDS])
            for row, source in clips
        ], []
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    chats, limit = CHATS in rows.column_names, model.source_limit
    tokenized = tokenize_prompts(target.tokenizer, rows, not target.model.config.is_encoder_decoder)
    for row, ids in zip(rows, tokenized, strict=True):
        if not row["source"].strip() or not ids:
            skipped.append(Skipped(row["row"], "the source is empty"))
        elif limit is not None and len(ids) > limit:
            reason = f"{len(ids)} source tokens, the target takes {limit}"
            skipped.append(Skipped(row["row"], reason))
        else:
            source = make_source(ids, target.model)
            prompts.append(Prompt(row["row"], row["source"], row["reference"], source, chats))
    if not prompts:
        raise ValueError(
            f"none of the {len(skipped)} input rows can be decoded"
            + (f" (row {skipped[0].row}: {skipped[0].reason})" if skipped else "")
            + "; give data with at least one row"
        )
    return prompts, skipped


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
    repeats: int = 3
    warmup: int = 3
    bootstrap: int = 1000
    bleu_tokenizer: str = "13a"
    """sacrebleu's tokenizer: 13a, or zh, ja-mecab, ko-mecab, char, ... for such targets."""
    compile: Compile = "off"
    """Whether calls of one sequence were compiled."""


def read_options(config: EvalConfig) -> EvaluationOptions:
    """The options in the settings of `drafttrain eval`."""
    own = ("baselines", "num_beams", "repeats", "warmup", "bootstrap", "bleu_tokenizer", "compile")
    sampling = config.decode.sampling
    return EvaluationOptions(
        sampling=build_sampling(sampling),
        max_new_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        **{name: getattr(config, name) for name in own},
        batch_sizes=sorted({1, *config.batch_sizes}),
    )
