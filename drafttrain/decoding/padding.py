"""Padding of rows of different lengths into one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def padded(rows: Sequence[Tensor], padding: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Returns the padded rows and their mask (1 = token). Shapes: [S] each -> [B, T], [B, T]."""
    ids = pad_sequence(list(rows), batch_first=True, padding_value=padding, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side=side)
