"""Losses as sums with their weights; the division happens once, after all ranks are added up."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LossSums(NamedTuple):
    """What one batch adds to a step. All are scalars on the model's device."""

    loss: Tensor
    """Weighted sum of the losses, with gradient."""
    weight: Tensor
    """Sum of the weights that `loss` is to be divided by, over ranks and accumulation."""
    correct: Tensor
    """Predictions that hit their label."""
    counted: Tensor
    """Predictions counted in `correct`."""


def smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sum over rows of weight * label-smoothed cross entropy, and the sum of weights.

    Shapes: logits [N, V], labels [N] (no ignored ones), weights [N]. N = 0 keeps a graph.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return (losses * weights).sum(), weights.sum()
