"""Bigram tables for Max-Gram: the most frequent successor of each token in a target's outputs.

CS Drafting (Chen et al. 2024) counts bigrams in Wikipedia instead.
"""

from collections import Counter
from itertools import chain, pairwise

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import BigramsConfig
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.data.shards.store import write_tensors
from drafttrain.data.shards.writing import named_disk_errors, say

NEXT = "next"
"""Name of the tensor."""


def count_bigrams(outputs: list[list[int]]) -> Tensor:
    """Returns the most frequent successor of each token up to the largest one, the smaller id on
    ties; -1 if it has none. Raises ConfigError if all outputs are empty."""
    if not any(outputs):
        raise ConfigError("no output holds a token; distil longer outputs")
    pairs = Counter(pair for output in outputs for pair in pairwise(output))
    table = torch.full((1 + max(chain.from_iterable(outputs)),), -1, dtype=torch.long)
    for token, following in sorted(pairs, key=lambda pair: (pairs[pair], -pair[1])):
        table[token] = following  # the most frequent comes last
    return table


def write_bigrams(settings: BigramsConfig) -> None:
    """Counts the bigrams in the outputs of a finished distillation and writes the table. Raises
    ConfigError for an unfinished folder and for a file name without .safetensors."""
    if settings.out.suffix != ".safetensors":
        raise ConfigError(f"out = {str(settings.out)!r} must end in .safetensors; rename it")
    table = count_bigrams(list(load_distilled(settings.distilled)["target_ids"]))
    with named_disk_errors(settings.out.parent):
        settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(settings.out, {NEXT: table})
    say(f"{settings.out}: successors of {int((table >= 0).sum())} tokens")


def read_bigrams(file: str, vocabulary: int) -> list[int]:
    """Reads a table for Max-Gram and pads it to the vocabulary. Raises ConfigError if the file is
    not such a table or has tokens beyond the vocabulary."""
    try:
        table = load_file(file)[NEXT]
    except (SafetensorError, OSError, KeyError) as error:
        raise ConfigError(
            f"bigrams = {file!r} is no table of successors ({error}); make one with `drafttrain "
            "bigrams --distilled FOLDER --out FILE.safetensors`"
        ) from None
    largest = max(len(table) - 1, int(table.max()))
    if largest >= vocabulary:
        raise ConfigError(
            f"bigrams = {file!r} speaks of token {largest}, but the target has {vocabulary} "
            "tokens; count the outputs of this target"
        )
    return table.tolist() + [-1] * (vocabulary - len(table))
