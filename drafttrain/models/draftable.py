"""Drafters that draft a part of the vocabulary: the tokens, and the score of all others."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError

UNDRAFTED = -1e4
"""Score of tokens that a drafter cannot draft: no probability in float32 and narrower types, and
finite, so that nothing computed from a row becomes NaN."""


def draftable_tokens(config: PretrainedConfig, vocabulary: int) -> Tensor | None:
    """The tokens that a drafter can draft, in rising order; None: all.

    Raises ConfigError where config.json holds no such list.
    """
    tokens = getattr(config, "draftable_tokens", None)
    if tokens is None:
        return None
    found = torch.tensor(tokens, dtype=torch.long)
    sound = len(found) > 0 and found[0] >= 0 and found[-1] < vocabulary
    if not sound or not (found[1:] > found[:-1]).all():
        raise ConfigError(
            f"draftable_tokens of {config._name_or_path!r} are no rising list of tokens below "
            f"{vocabulary}; delete them from its config.json, and it drafts all"
        )
    return found


def places_of(labels: Tensor, draftable: Tensor | None, ignored: int) -> Tensor:
    """Where tokens stand among the draftable ones, in rising order; `ignored` where they do not.
    Shapes: labels [...], draftable [N] (None: all) -> [...]."""
    if draftable is None:
        return labels
    places = torch.searchsorted(draftable, labels.contiguous()).clamp(max=len(draftable) - 1)
    return torch.where(draftable[places] == labels, places, ignored)
