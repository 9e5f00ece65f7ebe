"""Previous-token features: correct a slot's prediction by the token drafted before it.

Slots that are predicted in one forward pass do not see each other's tokens. A low-rank correction
of a slot's hidden state adds the previous token. Its features can be computed once for the whole
vocabulary (`decoding/drafters/candidates.py`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SILU_OFF = -1e4
"""Input at which SiLU and its derivative are 0."""


class PreviousToken(nn.Module):
    """hidden + W_o silu(W_h hidden + W_p norm(embedded)).

    Its users initialise W_o with zeros, so that training starts without a correction.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, rank)
        self.embedding = nn.Linear(width, rank, bias=False)
        self.out = nn.Linear(rank, width, bias=False)

    def features(self, embedded: Tensor) -> Tensor:
        """Computes the features of tokens from their embeddings. Shapes: [..., D] -> [..., R]."""
        embedded = embedded.to(self.embedding.weight.dtype)
        return self.embedding(F.rms_norm(embedded, embedded.shape[-1:]))

    def forward(self, hidden: Tensor, embedded: Tensor, present: Tensor | None = None) -> Tensor:
        """Corrects the states of slots by the embeddings of their previous tokens.

        present: which slots have a previous token; None: all. Shapes: hidden [..., D], embedded
        [..., D], present [...] -> [..., D].
        """
        features = self.features(embedded)
        if present is not None:
            features = torch.where(present[..., None], features, SILU_OFF)
        return hidden + self.out(F.silu(self.hidden(hidden) + features))
