"""Drafters for a part of the vocabulary: the draftable tokens, and the score of all others."""

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError

UNDRAFTED = -1e4
"""Score of tokens that a drafter cannot draft: its probability is 0 in float32 and narrower types,
and it is finite, so that no result becomes NaN."""


def check_output_tokens(tokens: int | str | None, vocabulary: int) -> None:
    """Raises ConfigError for more draftable tokens than the target's vocabulary has."""
    if isinstance(tokens, int) and tokens > vocabulary:
        raise ConfigError(
            f"drafter.output_tokens = {tokens} is more than the target's {vocabulary} tokens; give "
            "fewer"
        )


def draftable_tokens(config: PretrainedConfig, vocabulary: int) -> Tensor | None:
    """Returns the tokens that a drafter can draft, in rising order; None: all.

    Raises ConfigError if `draftable_tokens` in config.json is not a valid list.
    """
    listed = getattr(config, "draftable_tokens", None)
    if listed is None:
        return None
    tokens = torch.tensor(listed, dtype=torch.long)
    in_range = len(tokens) > 0 and tokens[0] >= 0 and tokens[-1] < vocabulary
    if not in_range or not (tokens[1:] > tokens[:-1]).all():
        raise ConfigError(
            f"draftable_tokens of {config._name_or_path!r} are not a rising list of tokens below "
            f"{vocabulary}; delete them from its config.json to draft all tokens"
        )
    return tokens


def mask_undrafted(logits: Tensor, draftable: Tensor) -> Tensor:
    """Returns the logits, `UNDRAFTED` for tokens that are not draftable. Shapes: [..., V]."""
    masked = torch.full_like(logits, UNDRAFTED)
    return masked.index_copy_(-1, draftable, logits.index_select(-1, draftable))


def draftable_indices(labels: Tensor, draftable: Tensor | None, ignored: int) -> Tensor:
    """Returns the index of each label among the draftable tokens, `ignored` for other tokens.
    Shapes: labels [...], draftable [N] in rising order (None: all) -> [...]."""
    if draftable is None:
        return labels
    draftable = draftable.to(labels.device)
    indices = torch.searchsorted(draftable, labels.contiguous()).clamp(max=len(draftable) - 1)
    return torch.where(draftable[indices] == labels, indices, ignored)
