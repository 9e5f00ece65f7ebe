"""Blockwise Decoding's objective: each head predicts a later token of the target's own output."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.data.batches.block_rows import BlockRowsBatch
from drafttrain.decoding.engine.teacher_forcing import project, states_before
from drafttrain.models.block_heads import BlockHeads
from drafttrain.training.losses import LossSums, smoothed_cross_entropy
from drafttrain.training.objective import Teacher


class PredictAhead(nn.Module):
    """Cross entropy of head j at the state that judges y_i, against y_{i+j} (Stern et al. 2018).

    The target runs along its own outputs without gradient. Only its states enter the loss that the
    batch chose: all positions of all heads through the output projection would take most of the
    time. The paper trains one head a step, drawn at random, for the same reason.
    """

    parts = None

    def __init__(self, heads: BlockHeads, target: PreTrainedModel) -> None:
        super().__init__()
        self.model = heads
        self.teacher = Teacher(target)

    def forward(self, batch: BlockRowsBatch, progress: float) -> LossSums:
        states = self.states(batch).to(self.model.dtype)
        logits = project(self.teacher.model, self.model(states, batch.counts))
        weights = torch.ones_like(batch.labels, dtype=torch.float)
        loss, weight = smoothed_cross_entropy(logits, batch.labels, weights, 0.0)
        correct = logits.argmax(-1) == batch.labels
        return LossSums(loss, weight, correct.sum(), weight.detach().clone())

    def states(self, batch: BlockRowsBatch) -> Tensor:
        """The target's states that the batch chose, without gradient. Shapes: -> [M, D]."""
        target = self.teacher.on(batch.rows.device)
        return torch.cat(states_before(target, batch.sources, batch.targets))[batch.rows]
