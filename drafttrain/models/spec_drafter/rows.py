"""What a Spec-Drafter's decoder is fed, and what it keeps of it: rows of tokens and of slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PREFIX = -1
"""Value of `block` for rows of the prefix."""
PADDING = -2
"""Value of `block` for rows that are padding."""


@dataclass(frozen=True)
class Memory:
    """What the decoder keeps of one source: cross-attention keys and values of every layer."""

    keys_values: list[tuple[Tensor, Tensor]]
    mask: Tensor | None
    """[B, 1, 1, S] true where a source token is; None: all are."""


@dataclass(frozen=True)
class Rows:
    """Decoder input rows: a prefix and masked blocks, all of one sentence in one line.

    A row of the prefix (block = PREFIX) sees prefix rows up to position `limit`; a row of block b
    sees prefix rows up to `limit` and every row of block b, or those up to itself where slots are
    causal. Shapes: all [B, T].
    """

    tokens: Tensor
    positions: Tensor
    block: Tensor
    limit: Tensor

    def visible(
        self, bidirectional: bool, before: Rows | None = None, causal_slots: bool = False
    ) -> Tensor:
        """[B, 1, T, S] true where row t may look at row s of `before` and these rows."""
        keys = self if before is None else self.after(before)
        is_prefix = keys.block == PREFIX
        prefix = is_prefix[:, None, :] & (keys.positions[:, None, :] <= self.limit[:, :, None])
        same = (keys.block[:, None, :] == self.block[:, :, None]) & (self.block >= 0)[:, :, None]
        if causal_slots:
            same &= keys.positions[:, None, :] <= self.positions[:, :, None]
        seen = prefix | same
        if bidirectional:  # one block: the prefix sees it too
            seen = seen | ((self.block == PREFIX)[:, :, None] & (keys.block == 0)[:, None, :])
        return seen[:, None]

    def part(self, start: int, end: int | None = None) -> Rows:
        """Some of the rows, all of every line."""
        return Rows(*(value[:, start:end] for value in vars(self).values()))

    def at(self, columns: Tensor) -> Rows:
        """The rows in these columns of each line. Shapes: [B, R]."""
        return Rows(*(value.gather(1, columns) for value in vars(self).values()))

    def after(self, before: Rows) -> Rows:
        """Both, `before` first."""
        pairs = zip(vars(before).values(), vars(self).values(), strict=True)
        return Rows(*(torch.cat(pair, dim=1) for pair in pairs))


@dataclass(frozen=True)
class Read:
    """Rows that have been read: of a causal prefix, what the blocks after it look at."""

    rows: Rows
    hidden: Tensor
    """[B, T, D]"""
    keys_values: list[tuple[Tensor, Tensor]]
