"""The best tokens of each slot of a block, scored again with the token before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.decoding.sampling import likeliest

CANDIDATES = 64
"""Tokens a slot that are scored again with the token before them; all others keep their scores."""


def best_alone(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates of slots: scores and tokens, best first. Shapes: [N, V] -> [N, C], [N, C]."""
    return likeliest(logits, CANDIDATES)


class Candidates:
    """The best tokens of each slot alone; their scores, once the token before is known.

    Scoring them takes a small part of a projection's time. rows, features: of every token what its
    scores, and what those after it, are made of (`SpecDrafter.previous_token_rows` and
    `.previous_token_features`). Shapes: logits [N, V] and from_hidden [N, R] of the slots of all
    sequences, which have these lengths; those of fewer slots are filled up.
    """

    def __init__(
        self,
        logits: Tensor,
        from_hidden: Tensor,
        lengths: Sequence[int],
        rows: Tensor,
        features: Tensor,
    ) -> None:
        scores, tokens = best_alone(logits)
        self.tokens, self._scores, self._from_hidden = (
            _in_lines(own, lengths) for own in (tokens, scores, from_hidden)
        )
        self._directions = F.embedding(self.tokens, rows)  # tokens [B, K, C]
        self._features = features

    def after(self, slot: int, previous: Tensor) -> Tensor:
        """Scores of a slot's candidates after these tokens. Shapes: [B] -> [B, C]."""
        gate = F.silu(self._from_hidden[:, slot] + F.embedding(previous, self._features))
        scores = self._scores[:, slot]  # float32, in half precision too
        directions, gate = self._directions[:, slot].to(scores.dtype), gate.to(scores.dtype)
        return torch.baddbmm(scores[..., None], directions, gate[..., None])[..., 0]

    def likeliest_chains(self, last: Sequence[int]) -> list[list[int]]:
        """The likeliest token of each slot after that of the slot before, of the first one after
        the last committed token. Shapes: [B] -> [B, K]."""
        previous, drafted = torch.tensor(last, device=self.tokens.device), []
        for slot in range(self.tokens.shape[1]):
            best = self.after(slot, previous).argmax(-1, keepdim=True)
            previous = self.tokens[:, slot].gather(1, best)[:, 0]
            drafted.append(previous)
        return torch.stack(drafted, dim=1).tolist()


def _in_lines(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Shapes: [N, ...] -> [B, K, ...]."""
    if len(lengths) == 1:
        return rows[None]
    return pad_sequence(rows.split(list(lengths)), batch_first=True)
