"""Sources read more coarsely: means of neighbouring encoder states (ours).

Whisper's encoder puts out 1,500 states for 30 s, a dozen or more for each word, and cross-attention
reads their keys and values in every layer of every round, and of every step of training. Keys and
values are linear in the states, so means of the target's own are those of the means.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def group_means(states: Tensor, size: int) -> Tensor:
    """Means of `size` states that follow each other; the last group may be smaller.

    Shapes: [..., S, D] -> [..., ceil(S / size), D].
    """
    if size == 1:
        return states
    length = states.shape[-2]
    whole = length - length % size
    means = states[..., :whole, :].unflatten(-2, (-1, size)).mean(-2)
    if whole == length:
        return means
    return torch.cat((means, states[..., whole:, :].mean(-2, keepdim=True)), dim=-2)


def masked_group_means(states: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`group_means` of the states that are there, and which groups have any.

    Shapes: states [B, S, D], mask [B, S] (true = there) -> [B, G, D], [B, G].
    """
    if size == 1:
        return states, mask
    missing = -states.shape[1] % size
    there = F.pad(mask, (0, missing)).unflatten(1, (-1, size))
    padded = F.pad(states * mask[..., None], (0, 0, 0, missing)).unflatten(1, (-1, size))
    counts = there.sum(-1)
    return padded.sum(2) / counts.clamp(min=1)[..., None], counts > 0
