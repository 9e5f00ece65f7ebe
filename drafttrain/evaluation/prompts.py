"""The inputs of an evaluation, tokenised."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from drafttrain.build.pairs import Pair
from drafttrain.config.base import ConfigError
from drafttrain.config.runs import run_of
from drafttrain.data.inputs.chats import CHAT, Refused
from drafttrain.data.inputs.clips import AUDIO, SECONDS, clip_source
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.rows import REASON, usable
from drafttrain.data.inputs.tokens import describe_prompts, say_reasons, tokenize_prompts
from drafttrain.data.shards.outputs import input_keys
from drafttrain.data.shards.writing import say
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Source
from drafttrain.models.loading import LoadedTarget

MOST_TRAINING_TEXTS, MOST_TRAINING_CLIPS = 100_000, 2_000
"""Maximal numbers of training texts and training clips that evaluation inputs are compared with."""


@dataclass(frozen=True)
class Prompt:
    """One input row, tokenised."""

    row: int
    """0-based row number in the original file."""
    text: str
    reference: str | None
    source: Source
    chat: bool = False
    """Whether the input is a chat."""
    seconds: float | None = None
    """Duration of an audio clip, whose `text` is its name; None for text."""


@dataclass(frozen=True)
class Skipped:
    """An input row that cannot be decoded."""

    row: int
    reason: str


def read_prompts(pair: Pair, rows: Dataset) -> tuple[list[Prompt], list[Skipped]]:
    """Tokenises rows of texts or chats from `load_inputs`, or computes the features of audio clips;
    rows that cannot be used are skipped and their reasons printed.

    Raises ConfigError for chats without a chat template, ValueError if no row is left.
    """
    rows, skipped, tokens = usable_rows(pair, rows)
    prompts, target = [], pair.target
    for row, ids in zip(rows, tokens, strict=True):
        source = clip_source(target, row) if AUDIO in row else make_source(ids, target.model)
        texts = row["source"], row["reference"]
        prompts.append(Prompt(row["row"], *texts, source, CHAT in row, row.get(SECONDS)))
    return prompts, skipped


def usable_rows(pair: Pair, rows: Dataset) -> tuple[Dataset, list[Skipped], list[list[int]]]:
    """Returns the rows that `read_prompts` does not skip, those that it skips, and the tokens of
    the former; prints and raises as it does, but reads no audio."""
    tokens = usable_tokens(pair.target, rows, pair.model.source_limit)
    usable = [index for index, ids in enumerate(tokens) if not isinstance(ids, Refused)]
    numbered = zip(rows["row"][:], tokens, strict=True)
    skipped = [Skipped(row, ids.reason) for row, ids in numbered if isinstance(ids, Refused)]
    return rows.select(usable), skipped, [tokens[index] for index in usable]


def say_training_inputs(drafter: str, rows: Dataset) -> None:
    """Prints how many inputs are also among the drafter's first training inputs, if any; prints
    nothing if the drafter is no run folder or its training data are missing."""
    run, audio = run_of(drafter), AUDIO in rows.column_names
    if run is None or not Path(run.recipe.data.path).exists():
        return
    most = MOST_TRAINING_CLIPS if audio else MOST_TRAINING_TEXTS
    most = min(run.recipe.data.limit or most, most)
    with suppress(ConfigError):  # the data may have changed since
        training = load_inputs(run.recipe.data.model_copy(update={"limit": most}), audio=audio)
        known, keys = set(input_keys(usable(training))), input_keys(usable(rows))
        if shared := sum(key in known for key in keys):
            say(f"the drafter's training data hold {shared:,} of {len(keys):,} inputs too")


def usable_tokens(
    target: LoadedTarget, rows: Dataset, limit: int | None
) -> list[list[int] | Refused]:
    """Returns the tokens of each row ([] for a clip) or why it is skipped. Prints the reasons and
    which columns were read. Raises ValueError if no row is left."""
    if AUDIO in rows.column_names:
        tokens = [[] if reason is None else Refused(reason) for reason in rows[REASON][:]]
    else:
        decoder_only = not target.model.config.is_encoder_decoder
        vocabulary = target.model.get_input_embeddings().num_embeddings
        limits = {} if limit is None else {f"the target takes {limit}": limit}
        tokens = tokenize_prompts(target.tokenizer, rows, decoder_only, limits, vocabulary)
    refused = zip(rows["row"][:], tokens, strict=True)
    skipped = {row: one.reason for row, one in refused if isinstance(one, Refused)}
    if len(skipped) == len(tokens):
        first = "".join(f" (row {row}: {reason})" for row, reason in [*skipped.items()][:1])
        raise ValueError(
            f"none of the {len(tokens)} input rows can be decoded{first}; give data with at least "
            "one row"
        )
    if rows.info.description:
        say(describe_prompts(target.tokenizer, rows))
    if skipped:
        say(f"{len(skipped)} of {len(tokens)} rows are skipped:")
        say_reasons(skipped)
    return tokens


def is_cut(model: CachedModel, tokens: Sequence[int], wanted: int) -> bool:
    """Returns whether an output ended because the target has no more positions: before EOS and
    before `wanted` tokens."""
    return len(tokens) < wanted and tokens[-1] not in model.eos_ids
