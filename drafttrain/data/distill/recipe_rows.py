"""Training data of recipes: the target's outputs, distilled if they are missing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as compute
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.config.inputs import DataConfig
from drafttrain.config.reading import settings_of_group
from drafttrain.config.recipes import VALIDATION_ROWS, DistillingRecipe, HeadRecipe
from drafttrain.data.distill.distill import distill
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.decoding.engine.architectures import position_limit
from drafttrain.models.loading import LoadedTarget, load_target


def distillations(settings: DistillingRecipe) -> dict[str, DistillConfig]:
    """Returns the distillations of `data` and, if set, `held_out`, by name. Raises ConfigError."""
    out = settings.distilled or settings.run / "distilled"
    plans = {"data": distill_settings(settings, settings.data, out)}
    if settings.held_out is not None:
        limit = min(settings.held_out.limit or VALIDATION_ROWS, VALIDATION_ROWS)
        data = settings.held_out.model_copy(update={"limit": limit})
        out = settings.run / "held_out"
        plans["held_out"] = distill_settings(settings, data, out)
    return plans


def distill_settings(settings: DistillingRecipe, data: DataConfig, out: Path) -> DistillConfig:
    """Returns the settings of the distillation of `data` into the folder `out`.
    distill.target.dtype may differ from the recipe's dtype, e.g. to distil in bfloat16 if that is
    faster, and train in float32. Raises ConfigError."""
    given, target = dict(settings.distill), settings.target
    fixed: dict[str, Any] = {"target": target, "data": data, "out": out}
    only_dtype = set(given.get("target") or ()) == {"dtype"}
    if only_dtype and not isinstance(settings, HeadRecipe):
        fixed["target"] = {**target.model_dump(), **given.pop("target")}
    return settings_of_group(DistillConfig, "distill", given, fixed)


def distilled_rows(
    settings: DistillingRecipe, target: LoadedTarget
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Distils what is missing; returns the target's outputs for training and for validation."""
    wanted = distillations(settings)
    decoding = wanted["data"].target  # all groups have the same
    if decoding != settings.target:
        target = load_target(decoding)
    for distillation in wanted.values():
        distill(distillation, target)
    rows = {group: load_distilled(distillation.out) for group, distillation in wanted.items()}
    return rows["data"], rows.get("held_out")


def row_lengths(rows: datasets.Dataset) -> np.ndarray:
    """Returns the number of source and output tokens of each row. Shapes: -> [rows, 2]."""
    table = rows.with_format("arrow")[:]
    sizes = [compute.list_value_length(table[name]) for name in ("source_ids", "target_ids")]
    return np.stack([size.to_numpy() for size in sizes], axis=1).astype(np.int64)


def rows_with_labels(rows: datasets.Dataset, reads_prompt: bool) -> np.ndarray:
    """Returns the rows with at least one label, [N]. If the target reads prompts, as for state
    drafters, it supplies the first output token, so only outputs of two or more tokens have labels.
    Raises ConfigError if there is no such row."""
    labelled = np.flatnonzero(row_lengths(rows)[:, 1] >= (1 if reads_prompt else 2))
    if not len(labelled):
        raise ConfigError(
            "all distilled outputs are single tokens, which the target itself predicts from the "
            "prompt, so there is nothing to learn; give longer ones "
            "(distill.sampling.max_new_tokens)"
        )
    return labelled


def choose_mask(
    trained: int | None, tokenizer: PreTrainedTokenizerBase, vocabulary: int, rows: datasets.Dataset
) -> int:
    """Chooses a mask token that occurs in no distilled row.

    In order of preference: `trained` (of an earlier training), the tokenizer's mask token, ids
    without a token, special tokens, all others; within each, the largest id. Never the BOS, EOS,
    padding or unknown token. Raises ConfigError if every token occurs.
    """
    count, t = count_tokens(rows, ("source_ids", "target_ids"), vocabulary), tokenizer
    taken = {t.bos_token_id, t.eos_token_id, t.pad_token_id, t.unk_token_id}
    named, special = set(t.get_vocab().values()), {t.mask_token_id, *t.added_tokens_decoder}
    free = [token for token in range(vocabulary) if not count[token] and token not in taken]
    if not free:
        raise ConfigError(
            f"the distilled rows hold all {vocabulary} tokens of the vocabulary, so that none can "
            "stand for a mask; add a special token to the target's tokenizer"
        )

    def rank(token: int) -> tuple[bool, bool, bool, bool, int]:
        own = token == trained, token == t.mask_token_id
        return *own, token not in named, token in special, token

    return max(free, key=rank)


def check_positions(drafter: PretrainedConfig, rows: datasets.Dataset) -> None:
    """Raises ConfigError if a row has more tokens than a decoder-only drafter has positions."""
    limit = position_limit(drafter)
    longest = int(row_lengths(rows).sum(axis=1).max()) - 1  # the last token is no input
    if limit is not None and longest > limit:
        raise ConfigError(
            f"the longest row has {longest} tokens, but the drafter has {limit} positions; leave "
            "long rows out (distill.max_source_tokens, distill.sampling.max_new_tokens), or start "
            "from a model with more"
        )


def frequent_tokens(
    rows: datasets.Dataset, count: int | None, vocabulary: int, ends: int | Sequence[int] | None
) -> list[int]:
    """Returns the `count` tokens that a drafter can draft, ascending: EOS tokens, then the most
    frequent in outputs, then the smallest ids. count: None for the EOS tokens and all that occur in
    outputs."""
    counts = count_tokens(rows, ("target_ids",), vocabulary)
    counts[[] if ends is None else np.atleast_1d(ends)] = counts.max() + 1
    count = np.count_nonzero(counts) if count is None else count
    return np.sort(np.argsort(-counts, kind="stable")[:count]).tolist()


def count_tokens(rows: datasets.Dataset, columns: Sequence[str], vocabulary: int) -> np.ndarray:
    """Counts the occurrences of each token in these columns. Shapes: -> [V]."""
    table = rows.with_format("arrow")[:]
    tokens = [table[name].combine_chunks().flatten().to_numpy() for name in columns]
    return np.bincount(np.concatenate(tokens), minlength=vocabulary)
