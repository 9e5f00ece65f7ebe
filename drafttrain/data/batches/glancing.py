"""Glancing (SpecDec Section 3.1.3, after Qian et al. 2021): reveal some of what was missed.

A first pass without gradient predicts the masked slots; a share of as many slots as it got wrong
is revealed by feeding the reference token, and only the rest is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.models.spec_drafter.slots import IGNORED, Layout


def glancing_ratio(start: float, end: float, progress: float) -> float:
    """Linear from start to end; `progress` is 0 at the first training step and 1 at the last."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def choose_revealed(wrong: Tensor, revealable: Tensor, priority: Tensor, ratio: float) -> Tensor:
    """Which slots of each block to reveal: floor(ratio * wrong slots), uniformly chosen.

    The slots with the smallest of independent uniform priorities are a uniform choice without
    replacement. Shapes: wrong [B, A] counts, revealable [B, A, M] bool, priority [B, A, M]
    -> [B, A, M] bool.
    """
    count = (wrong * ratio).floor().long()
    order = priority.masked_fill(~revealable, float("inf")).argsort(-1).argsort(-1)
    return (order < count[..., None]) & revealable


def reveal(layout: Layout, revealed: Tensor, anchored: bool) -> tuple[Tensor, Tensor]:
    """Tokens and labels after revealing: the token goes in, its label leaves the loss.

    In `paper` slots a row predicts the token at its own place; in `anchored` slots the row before
    does. Shapes: revealed [B, A, M] bool -> tokens [B, T], labels [B, T].
    """
    prefix = layout.of_prefix(layout.rows.tokens)
    slots = torch.where(
        revealed, layout.of_blocks(layout.fill), layout.of_blocks(layout.rows.tokens)
    )
    tokens = torch.cat((prefix, slots.flatten(1)), dim=1)
    known = revealed
    if anchored:
        known = torch.cat((revealed[..., 1:], torch.zeros_like(revealed[..., :1])), dim=-1)
    kept = torch.where(known, IGNORED, layout.of_blocks(layout.labels))
    labels = torch.cat((layout.of_prefix(layout.labels), kept.flatten(1)), dim=1)
    return tokens, labels
