"""Input rows as prompts: tokenised, those that cannot be decoded set aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from datasets import Dataset

from drafttrain.config.commands import TuneConfig
from drafttrain.data.inputs.clips import AUDIO, SECONDS
from drafttrain.data.inputs.hearing import hear
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.rows import CHATS
from drafttrain.data.inputs.tokens import tokenize_prompts
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Source
from drafttrain.models.loading import LoadedTarget, check_target
from drafttrain.models.speech import hears


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


USES = {"data": "choose", "report_data": "report"}
"""What tuning needs inputs for, by their setting."""


def load_both(settings: TuneConfig) -> dict[str, Dataset]:
    """The rows to choose on, and those to report on where they are given, by their setting."""
    given = {name: getattr(settings, name) for name in USES}
    heard = hears(check_target(settings.target))
    return {
        name: load_inputs(data, name, heard) for name, data in given.items() if data is not None
    }


def read_both(
    target: LoadedTarget, model: CachedModel, settings: TuneConfig, rows: Mapping[str, Dataset]
) -> tuple[PromptSet, PromptSet | None]:
    """The prompts of these rows. Raises as `read_prompts`."""
    found = {
        name: PromptSet(getattr(settings, name).path, *read_prompts(target, model, own))
        for name, own in rows.items()
    }
    return found["data"], found.get("report_data")


def both_in_words(settings: TuneConfig) -> str:
    """How many inputs of which data are to choose on and to report on."""
    return "; ".join(
        f"{len(rows)} of {getattr(settings, name).path} to {USES[name]}"
        for name, rows in load_both(settings).items()
    )
