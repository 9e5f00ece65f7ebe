"""Batches for block heads: which positions of each output every head learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.batches.examples import Batch, Example


@dataclass(frozen=True)
class BlockRowsBatch(Batch):
    """Outputs with their sources, and the M states of them that heads learn from.

    A state is the one that a row of the target's logits comes from; those of all outputs count on
    from one output to the next.
    """

    sources: Sequence[Sequence[int]]
    """B x [S_b]"""
    targets: Sequence[Sequence[int]]
    """B x [L_b], EOS included."""
    counts: tuple[int, ...]
    """States of each head, one head's after the other's."""
    rows: Tensor
    """[M] number of each state among those of all outputs."""
    labels: Tensor
    """[M] the token that the head is to predict from it."""


@dataclass(frozen=True)
class BlockRowsCollator:
    """Draws positions afresh for each (seed, epoch, row).

    Head 1 learns from `positions` of each output, head j from a j-th of them and one at least, or
    from all where there are fewer: a draft ends at its first miss, so the first heads count most.
    """

    heads: int
    positions: int
    seed: int

    def __call__(self, examples: Sequence[Example]) -> BlockRowsBatch:
        rows: list[list[np.ndarray]] = [[] for _ in range(self.heads)]
        labels: list[list[np.ndarray]] = [[] for _ in range(self.heads)]
        start = 0
        for epoch, row, _, target, *_ in examples:
            random = np.random.default_rng((self.seed, 1, epoch, row))
            tokens = np.asarray(target)
            for j in range(1, min(self.heads, len(target) - 1) + 1):
                room = len(target) - j  # the state that judges y_i is head j's for y_{i + j}
                chosen = random.permutation(room)[: -(-self.positions // j)]
                rows[j - 1].append(start + chosen)
                labels[j - 1].append(tokens[chosen + j])
            start += len(target)
        return BlockRowsBatch(
            sources=[source for _, _, source, *_ in examples],
            targets=[target for _, _, _, target, *_ in examples],
            counts=tuple(sum(map(len, of_head)) for of_head in rows),
            rows=_joined(rows),
            labels=_joined(labels),
        )


def _joined(of_heads: list[list[np.ndarray]]) -> Tensor:
    parts = [part for of_head in of_heads for part in of_head]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))
