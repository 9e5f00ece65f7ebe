"""Previous-token features: what the token drafted before a slot says of the one in it.

Slots that are predicted in one call do not know each other's tokens. A small correction of a slot's
last state, cheap enough to be worked out for every token once (`decoding/drafters/candidates.py`),
tells each the one before it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHUT = -1e4
"""Input at which silu is 0, and so is its slope."""


class PreviousToken(nn.Module):
    """hidden + W_o silu(W_h hidden + W_p norm(embedded)), at first no correction at all."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, rank)
        self.embedding = nn.Linear(width, rank, bias=False)
        self.out = nn.Linear(rank, width, bias=False)

    def features(self, embedded: Tensor) -> Tensor:
        """What tokens tell the slots after them, each embedding of one length. Shapes: [..., D] ->
        [..., R]."""
        embedded = embedded.to(self.embedding.weight.dtype)
        return self.embedding(F.rms_norm(embedded, embedded.shape[-1:]))

    def forward(self, hidden: Tensor, embedded: Tensor, present: Tensor | None = None) -> Tensor:
        """Slots' states, corrected by the embedded tokens before them. present: which have one;
        None: all.

        Shapes: hidden [..., D], embedded [..., E], present [...] -> [..., D].
        """
        features = self.features(embedded)
        if present is not None:
            features = torch.where(present[..., None], features, SHUT)
        return hidden + self.out(F.silu(self.hidden(hidden) + features))
