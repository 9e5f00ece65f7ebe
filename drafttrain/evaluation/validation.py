"""What a block drafter is worth while it trains: held-out rows, read in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch import Tensor, nn

from drafttrain.evaluation.teacher_forced import replay_rounds

ROWS_AT_ONCE = 64
"""Held-out rows that are read at a time."""


@dataclass(frozen=True)
class BlockValidation:
    """Teacher-forced tokens per round (exact for greedily distilled rows), loss, slot accuracy."""

    rows: datasets.Dataset
    collate: Callable[[Sequence[tuple[int, int, list[int], list[int]]]], Any]
    predict_blocks: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """The objective, [S] source, [L] output -> [L, k] drafts at every prefix of the output."""

    def __call__(self, objective: nn.Module) -> dict[str, float]:
        """The objective's `model` is validated; it maps (batch, progress) to LossSums."""
        device = objective.model.device
        tokens = rounds = 0
        sums = torch.zeros(4, dtype=torch.float64)
        for start in range(0, len(self.rows), ROWS_AT_ONCE):
            chunk = self.rows[start : start + ROWS_AT_ONCE]
            pairs = list(zip(chunk["source_ids"], chunk["target_ids"], strict=True))
            batch = self.collate([(0, start + i, s, t) for i, (s, t) in enumerate(pairs)])
            found = objective(batch.to(device), 1.0)
            sums += torch.stack([value.double().cpu() for value in found])
            for source, output in pairs:
                blocks = self.predict_blocks(objective, torch.tensor(source), torch.tensor(output))
                tokens, rounds = tokens + len(output), rounds + len(replay_rounds(blocks, output))
        loss, weight, correct, counted = sums.tolist()
        return {
            "mean_acceptance_length": tokens / rounds,
            "held_out_loss": loss / weight,
            "slot_accuracy": correct / counted,
        }
