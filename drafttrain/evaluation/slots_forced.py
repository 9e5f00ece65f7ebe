"""What a drafter of masked blocks is worth while it trains: acceptance on held-out outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.batches.masked_blocks import BlocksBatch, BlocksCollator, blocks_of_rows
from drafttrain.evaluation.teacher_forced import BlockValidation

VALIDATED_AT_ONCE = 8
"""Held-out rows that are read at a time, each with k times as many tokens as its output has."""


class FollowsBlocks(Protocol):
    """An objective whose batches are `BlocksBatch`es."""

    model: torch.nn.Module

    def rows(self, batch: BlocksBatch) -> tuple[Tensor, Tensor]:
        """Logits [N, C] and labels [N] at every labelled position."""
        ...

    def overlap(self, batch: BlocksBatch, logits: Tensor) -> Tensor:
        """How often a token drawn from each row is accepted. [N]"""
        ...

    def tokens(self, places: Tensor) -> Tensor:
        """Tokens of the vocabulary by their places in the rows."""
        ...


@dataclass(frozen=True)
class SlotValidation:
    """Acceptance on held-out outputs: in greedy rounds, and of tokens sampled behind accepted ones,
    slot by slot."""

    rows: Examples
    collate: BlocksCollator
    """Drops nothing."""

    def __call__(self, objective: FollowsBlocks) -> dict[str, float]:
        k = self.collate.k

        def drafts(objective: FollowsBlocks, example: Example) -> Tensor:
            batch = self.collate.alone([example]).to(objective.model.device)
            logits, _ = objective.rows(batch)
            found.append(objective.overlap(batch, logits).double().cpu())
            slots.append(batch.slots().cpu())
            tokens, length = objective.tokens(logits.argmax(-1)), len(example.target_ids)
            return blocks_of_rows(batch, tokens, k, length).cpu()

        found: list[Tensor] = []
        slots: list[Tensor] = []
        validation = BlockValidation(self.rows, self.collate.alone, drafts, VALIDATED_AT_ONCE)
        values = validation(objective)
        accepted, slot = torch.cat(found), torch.cat(slots)
        of_slots = {f"acceptance/{n + 1}": float(accepted[slot == n].mean()) for n in slot.unique()}
        return values | {"acceptance": float(accepted.mean())} | of_slots
