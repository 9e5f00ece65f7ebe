"""Input rows as prompts: tokenised, those that cannot be decoded set aside."""

from __future__ import annotations

from dataclasses import dataclass

from datasets import Dataset

from drafttrain.data.inputs.clips import AUDIO, SECONDS
from drafttrain.data.inputs.hearing import hear
from drafttrain.data.inputs.rows import CHATS
from drafttrain.data.inputs.tokens import tokenize_prompts
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Source
from drafttrain.models.loading import LoadedTarget


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


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one set of inputs."""

    path: str
    """File or Hub name, as it was given."""
    prompts: list[Prompt]
    skipped: list[Skipped]


def read_prompts(
    target: LoadedTarget, model: CachedModel, rows: Dataset
) -> tuple[list[Prompt], list[Skipped]]:
    """Tokenise the rows of `load_inputs`, texts or chats; those that do not fit are set aside.
    Clips are turned into features, and all fit.

    Raises ConfigError for chats without a template, ValueError where no row is left.
    """
    if AUDIO in rows.column_names:
        return [
            Prompt(
                row["row"],
                row["source"],
                row["reference"],
                hear(target, row),
                seconds=row[SECONDS],
            )
            for row in rows
        ], []
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    chats = CHATS in rows.column_names
    decoder_only = not target.model.config.is_encoder_decoder
    tokenized = tokenize_prompts(target.tokenizer, rows, decoder_only)
    for row, ids in zip(rows, tokenized, strict=True):
        if not row["source"].strip() or not ids:
            skipped.append(Skipped(row["row"], "the source is empty"))
        elif model.source_limit is not None and len(ids) > model.source_limit:
            skipped.append(
                Skipped(
                    row["row"], f"{len(ids)} source tokens, the target takes {model.source_limit}"
                )
            )
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
