"""Objective of Blockwise Decoding: each head predicts a later token of the target's output."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.data.batches.block_rows import BlockRowsBatch
from drafttrain.decoding.engine.teacher_forcing import project, teacher_forced_states
from drafttrain.models.block_heads import BlockHeads
from drafttrain.training.losses import LossSums, token_sums
from drafttrain.training.objective import Teacher


class PredictAhead(nn.Module):
    """Cross entropy of head j for y_{i+j}, from the state that predicts y_i (Stern et al. 2018).

    The target is teacher-forced on its outputs without gradient. Only the states sampled by the
    batch are in the loss: the output projection of all positions for all heads would dominate the
    time. For the same reason, the paper trains one random head per step.
    """

    parts = None

    def __init__(self, heads: BlockHeads, target: PreTrainedModel) -> None:
        super().__init__()
        self.model = heads
        self.teacher = Teacher(target)

    def forward(self, batch: BlockRowsBatch, progress: float) -> LossSums:
        states = self.states(batch).to(self.model.dtype)
        logits = project(self.teacher.model, self.model(states, batch.counts))
        return token_sums(logits, batch.labels)

    def states(self, batch: BlockRowsBatch) -> Tensor:
        """Returns the target's hidden states at `batch.rows`, without gradient, [M, D]."""
        target = self.teacher.on(batch.rows.device)
        inputs = [tokens[:-1] for tokens in batch.targets]  # no state of the last token is read
        return torch.cat(teacher_forced_states(target, batch.sources, inputs))[batch.rows]
