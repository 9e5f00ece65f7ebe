"""What a Spec-Drafter's config.json holds beside the fields of its family.

A Spec-Drafter is a model of its target's own family with another depth. `k`, `state_width`,
`draftable_tokens`, `slot_temperatures` and `target` are entries as other drafters have them; all
others are in the entry `spec_drafter`, which marks the kind.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from transformers import PretrainedConfig

MARK = "spec_drafter"
"""The entry of config.json."""


@dataclass(frozen=True)
class DraftShape:
    """How a Spec-Drafter drafts. Raises ValueError for settings that do not go together."""

    mask_id: int
    """Token that stands for an empty slot: the tokenizer's mask, an unused id, or a row more."""
    vocab_size: int
    """Tokens of the target."""
    slots: Literal["anchored", "paper"] = "anchored"
    """anchored: the last committed token predicts the first draft token, k - 1 masks the others.
    paper: k masks follow the prefix, each predicts the token in its own place."""
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    slot_attention: Literal["bidirectional", "causal"] = "bidirectional"
    """causal: slots see the earlier ones of their block alone."""
    encoder: Literal["own", "target"] = "own"
    """target: it reads the target's encoder states."""
    source_pooling: int = 1
    """Encoder states of the target that are averaged into one."""
    previous_token_rank: int = 0
    """Rank of the previous-token features; 0: none."""
    fused_layer: int | None = None
    """Layer of the target that the first decoder layer is a copy of, whose input the fusion of
    target hidden states is fitted to; None: it starts at zero."""
    logit_scale: float = 1.0
    """Factor of last hidden states before the output projection (T5)."""

    def __post_init__(self) -> None:
        if self.prefix_attention == "causal":
            return
        if self.slots == "anchored":
            raise ValueError(
                "anchored slots need a causal prefix (a prefix that sees the slots would see its "
                "own labels); set drafter.slots=paper or drafter.prefix_attention=causal"
            )
        if self.slot_attention == "causal":
            raise ValueError(
                "slots that see a prefix which sees them all are not causal; set "
                "drafter.prefix_attention=causal or drafter.slot_attention=bidirectional"
            )

    @property
    def anchored(self) -> bool:
        return self.slots == "anchored"

    @property
    def bidirectional(self) -> bool:
        return self.prefix_attention == "bidirectional"

    def masks(self, k: int) -> int:
        """Masked rows of a block of k slots."""
        return k - 1 if self.anchored else k


def shape_of(config: PretrainedConfig) -> DraftShape:
    """The shape that a Spec-Drafter's configuration holds."""
    return DraftShape(**getattr(config, MARK))


def mark(config: PretrainedConfig, shape: DraftShape) -> None:
    """Make a configuration that of a Spec-Drafter."""
    setattr(config, MARK, asdict(shape))
