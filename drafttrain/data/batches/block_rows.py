"""Batches for block heads: the positions of each output that every head is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.batches.examples import Batch, Example


@dataclass(frozen=True)
class BlockRowsBatch(Batch):
    """Sources and outputs, and the M target hidden states that the heads are trained on.

    A state is a hidden state that the target projects to logits. States are numbered consecutively
    through all outputs of the batch.
    """

    sources: Sequence[Sequence[int]]
    """B x [S_b]"""
    targets: Sequence[Sequence[int]]
    """B x [L_b], EOS included."""
    counts: tuple[int, ...]
    """Number of states of each head; `rows` and `labels` are ordered by head."""
    rows: Tensor
    """[M] index of each state among the states of all outputs."""
    labels: Tensor
    """[M] the token that the head must predict from the state."""


@dataclass(frozen=True)
class BlockRowsCollator:
    """Draws random positions for each (seed, epoch, row).

    Head j is trained on ceil(`positions` / j) positions of each output, or on all if there are
    fewer: a draft ends at its first miss, so the first heads matter most.
    """

    heads: int
    positions: int
    seed: int

    def __call__(self, examples: Sequence[Example]) -> BlockRowsBatch:
        rows: list[list[int]] = [[] for _ in range(self.heads)]
        labels: list[list[int]] = [[] for _ in range(self.heads)]
        start = 0
        for epoch, row, _, target, *_ in examples:
            random = np.random.default_rng((self.seed, 1, epoch, row))
            for j in range(1, min(self.heads, len(target) - 1) + 1):
                count = len(target) - j  # head j predicts y_{i + j} from the state before y_i
                for index in random.permutation(count)[: -(-self.positions // j)].tolist():
                    rows[j - 1].append(start + index)
                    labels[j - 1].append(target[index + j])
            start += len(target)
        return BlockRowsBatch(
            sources=[source for _, _, source, *_ in examples],
            targets=[target for _, _, _, target, *_ in examples],
            counts=tuple(map(len, rows)),
            rows=torch.tensor([*chain(*rows)], dtype=torch.long),
            labels=torch.tensor([*chain(*labels)], dtype=torch.long),
        )
