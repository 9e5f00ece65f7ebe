"""Sources read more coarsely: means of neighbouring encoder states (ours).

Whisper's encoder puts out 1,500 states for 30 s, a dozen or more for each word, and cross-attention
reads their keys and values in every layer of every round, and of every step of training. Keys and
values are linear in the states, so means of the target's own are those of the means.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def group_means(
    states: Tensor, size: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Means of `size` states that follow each other, of those that are there, and which groups have
    any; the last group may be smaller.

    Shapes: states [..., S, D], mask [..., S] (None: all are there) -> [..., G, D], [..., G].
    """
    if size == 1:
        return states, mask
    if mask is None:
        return group_means(states, size, states.new_ones(states.shape[:-1], dtype=bool))[0], None
    missing = -states.shape[-2] % size
    there = F.pad(mask, (0, missing)).unflatten(-1, (-1, size))
    padded = F.pad(states * mask[..., None], (0, 0, 0, missing)).unflatten(-2, (-1, size))
    counts = there.sum(-1)
    return padded.sum(-2) / counts.clamp(min=1)[..., None], counts > 0
