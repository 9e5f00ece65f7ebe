"""Entries of a Spec-Drafter's config.json in addition to those of its family.

A Spec-Drafter is a model of its target's family with another depth. `k`, `draftable_tokens`
and `target` are top-level entries, as in other drafters; all others are in the entry
`spec_drafter`, which marks the kind.
"""

from dataclasses import asdict, dataclass, fields
from typing import Literal

from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError

MARK = "spec_drafter"
"""Name of the entry in config.json."""


@dataclass(frozen=True)
class DraftShape:
    """How a Spec-Drafter drafts. Raises ValueError for settings that do not fit together."""

    mask_id: int
    """Mask token: the tokenizer's mask, an unused id, or an additional embedding."""
    vocab_size: int
    """Vocabulary size of the target."""
    slots: Literal["anchored", "paper"] = "anchored"
    """anchored: the last committed token predicts the first draft token, k - 1 masks the others.
    paper: k masks follow the prefix, and each predicts the token at its own position."""
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    encoder: Literal["own", "target"] = "own"
    """target: it reads the target's encoder states."""
    source_pooling: int = 1
    """Number of encoder states of the target that are averaged into one."""
    previous_token_rank: int = 0
    """Rank of the previous-token features; 0: none."""
    logit_scale: float = 1.0
    """Factor of last hidden states before the output projection (T5)."""

    def __post_init__(self) -> None:
        if self.bidirectional and self.anchored:
            raise ValueError(
                "anchored slots need a causal prefix (a bidirectional prefix would see its own "
                "labels); set drafter.slots=paper or drafter.prefix_attention=causal"
            )

    @property
    def anchored(self) -> bool:
        return self.slots == "anchored"

    @property
    def bidirectional(self) -> bool:
        return self.prefix_attention == "bidirectional"

    def masks(self, k: int) -> int:
        """Number of mask tokens of a block of k slots."""
        return k - 1 if self.anchored else k


def shape_of(config: PretrainedConfig) -> DraftShape:
    """Reads the shape from a Spec-Drafter's configuration. Raises ConfigError for unknown entries,
    as other versions of drafttrain wrote them."""
    entries = getattr(config, MARK)
    if unknown := sorted(entries.keys() - {field.name for field in fields(DraftShape)}):
        raise ConfigError(
            f"{MARK}.{unknown[0]} in the drafter's config.json is not known to this version of "
            "drafttrain, so it would draft otherwise than it was trained to; train it again"
        )
    return DraftShape(**entries)


def mark(config: PretrainedConfig, shape: DraftShape) -> None:
    """Marks a configuration as that of a Spec-Drafter."""
    setattr(config, MARK, asdict(shape))
