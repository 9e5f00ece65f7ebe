"""Source pooling: means of neighbouring encoder states (an addition of drafttrain).

Whisper's encoder returns 1,500 states for 30 s, a dozen or more per word, and cross-attention reads
their keys and values in each layer of each round and training step. Keys and values are linear in
the states, so the mean of the target's keys and values equals those of the mean state.
"""

import torch.nn.functional as F
from torch import Tensor


def group_means(
    states: Tensor, size: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Averages groups of `size` consecutive states, without masked ones; the last group may be
    smaller. Also returns the mask of groups with at least one state.

    Shapes: states [..., S, D], mask [..., S] (None: no padding) -> [..., G, D], [..., G].
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
