"""The inputs of an evaluation, tokenised."""

from __future__ import annotations

from dataclasses import dataclass

from datasets import Dataset

from drafttrain.build.pairs import Pair
from drafttrain.data.inputs.clips import AUDIO, SECONDS, hear
from drafttrain.data.inputs.rows import CHATS, tokenize_prompts
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Source


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


def read_prompts(pair: Pair, rows: Dataset) -> tuple[list[Prompt], list[Skipped]]:
    """Tokenises the rows of `load_inputs`, texts or chats, and skips those that do not fit. Clips
    become features, and all fit.

    Raises ConfigError for chats without a template, ValueError if no row is left.
    """
    target, limit = pair.target, pair.model.source_limit
    if AUDIO in rows.column_names:
        return [
            Prompt(
                row["row"], row["source"], row["reference"], hear(target, row), False, row[SECONDS]
            )
            for row in rows
        ], []
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    tokenized = tokenize_prompts(target.tokenizer, rows, not target.model.config.is_encoder_decoder)
    for row, ids in zip(rows, tokenized, strict=True):
        reason = None
        if not row["source"].strip() or not ids:
            reason = "the source is empty"
        elif limit is not None and len(ids) > limit:
            reason = f"{len(ids)} source tokens, the target takes {limit}"
        if reason is not None:
            skipped.append(Skipped(row["row"], reason))
            continue
        source, chat = make_source(ids, target.model), CHATS in rows.column_names
        prompts.append(Prompt(row["row"], row["source"], row["reference"], source, chat))
    if not prompts:
        raise ValueError(
            f"none of the {len(skipped)} input rows can be decoded"
            + (f" (row {skipped[0].row}: {skipped[0].reason})" if skipped else "")
            + "; give data with at least one row"
        )
    return prompts, skipped
