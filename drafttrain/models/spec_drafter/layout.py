"""Layout of a Spec-Drafter's decoder inputs: tokens, positions, attention mask and labels.

Each batch row holds the whole output of a sequence as prefix rows, followed by any number of blocks
of slots, each after its own prefix length. A block attends to the prefix up to its length and to
itself, so one forward pass trains (or predicts) many blocks (SpecDec trains one per sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.models.spec_drafter.shape import DraftShape

IGNORED = -100
"""Label of rows without a token to predict."""
PREFIX = -1
"""Value of `block` for prefix rows."""
PADDING = -2
"""Value of `block` for padding."""


@dataclass(frozen=True)
class Rows:
    """Decoder input rows: the prefix and the blocks of slots of each sequence. Shapes: all [B, T].

    A prefix row attends to prefix rows up to position `limit`. A row of block b attends to prefix
    rows up to `limit` and to all rows of block b.
    """

    tokens: Tensor
    positions: Tensor
    block: Tensor
    limit: Tensor

    def visible(self, shape: DraftShape, before: Rows | None = None) -> Tensor:
        """Returns the attention mask [B, T, S]: whether row t attends to row s of `before` and
        these rows. Padding attends to all rows."""
        keys = self if before is None else self.after(before)
        is_prefix = keys.block == PREFIX
        prefix = is_prefix[:, None, :] & (keys.positions[:, None, :] <= self.limit[:, :, None])
        same = (keys.block[:, None, :] == self.block[:, :, None]) & (self.block >= 0)[:, :, None]
        seen = prefix | same
        if shape.bidirectional:  # one block: the prefix sees it too
            seen = seen | ((self.block == PREFIX)[:, :, None] & (keys.block == 0)[:, None, :])
        return seen | (self.block == PADDING)[:, :, None]  # no row without a key

    def part(self, start: int, end: int | None = None) -> Rows:
        """Returns rows start..end-1 of each sequence."""
        return Rows(*(value[:, start:end] for value in vars(self).values()))

    def after(self, before: Rows) -> Rows:
        """Concatenates `before` and these rows."""
        pairs = zip(vars(before).values(), vars(self).values(), strict=True)
        return Rows(*(torch.cat(pair, dim=1) for pair in pairs))


def moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Applies `move` to all tensors of a value, including those in nested dataclasses."""
    if isinstance(value, Tensor):
        return move(value)
    if not is_dataclass(value):
        return value
    fields = {name: moved(one, move) for name, one in vars(value).items()}
    changed = {name: one for name, one in fields.items() if one is not getattr(value, name)}
    return replace(value, **changed)


@dataclass(frozen=True)
class Layout:
    """Decoder rows and their labels. T = prefix rows + blocks * mask rows; all [B, T]."""

    rows: Rows
    labels: Tensor
    """Token that the row predicts; IGNORED on padding, past EOS, and on unshifted prefix rows."""
    fill: Tensor
    """Output token at the row's own position, the input if glancing reveals the slot; -1: none."""
    previous: Tensor
    """Token before the predicted one."""
    blocks: int
    mask_rows: int
    learned: Tensor
    """[N] indices of the labels in the flattened [B, T]; computed on the CPU when the layout is
    made, to avoid a device synchronisation."""
    learned_in_blocks: Tensor
    """[N'] indices of the labels in the flattened block rows [B, A, M]."""

    def to(self, device: torch.device) -> Layout:
        return moved(self, lambda tensor: tensor.to(device))

    def of_blocks(self, x: Tensor) -> Tensor:
        """Returns the block rows of [B, T, ...] as [B, A, M, ...]."""
        return x[:, self.prefix_rows :].unflatten(1, (self.blocks, self.mask_rows))

    def of_prefix(self, x: Tensor) -> Tensor:
        return x[:, : self.prefix_rows]

    @property
    def prefix_rows(self) -> int:
        return self.labels.shape[1] - self.blocks * self.mask_rows


def lay_out(
    targets: Tensor,
    lengths: Tensor,
    prefixes: Tensor,
    shape: DraftShape,
    k: int,
    start_token: int,
    given: Tensor | None = None,
) -> Layout:
    """Lays out outputs y_1..y_L (including EOS) and blocks of k slots after y_1..y_p for each p.

    Each block has exactly k slots, also past the end of the output, so that the number of masks
    does not reveal its length (SpecDec). The first `given` tokens, which decoding starts from, are
    not predicted. Shapes: targets [B, L] with any padding, lengths [B], prefixes p [B, A] in
    given..length-1 or -1 for no block, given [B].
    """
    batch, longest = targets.shape
    blocks, masks, ends = prefixes.shape[1], shape.masks(k), lengths[:, None]
    start = torch.full((batch, 1), start_token)
    shifted = torch.cat((start, targets[:, :-1]), dim=1)

    positions = torch.arange(longest).expand(batch, -1)
    if shape.anchored:
        tokens, labels, valid = shifted, targets, positions < ends
    else:
        tokens, labels = targets, torch.full_like(targets, IGNORED)
        valid = positions < ends - 1
    limit = positions
    if shape.bidirectional:
        assert blocks == 1, "a bidirectional prefix attends to its block"
        valid = positions < prefixes
        limit = (prefixes - 1).expand_as(positions)
    predicted = valid if given is None else valid & (positions >= given[:, None])
    labels = torch.where(predicted, labels, IGNORED)
    block = torch.where(valid, PREFIX, PADDING)

    # block rows, [B, A, M]: indices count output tokens from 0, y_1 has index 0
    after = prefixes[:, :, None]
    exists = (after >= 0).expand(-1, -1, masks)
    fill_index = after + torch.arange(masks)  # the token that glancing reveals in the row
    label_index = fill_index + (1 if shape.anchored else 0)  # ... predicts, and its position
    slot_labels = torch.where(exists, _take(targets, label_index, ends, IGNORED), IGNORED)
    fill = torch.where(exists, _take(targets, fill_index, ends, -1), -1)
    # also defined one past the end: a draft may continue after EOS
    before = _take(targets, label_index - 1, ends, 0)
    block_previous = torch.where(label_index == 0, start_token, before)
    number = torch.where(exists, torch.arange(blocks)[:, None], PADDING)
    block_limit = (after if shape.anchored else after - 1).expand_as(exists)

    def joined(prefix: Tensor, slots: Tensor) -> Tensor:
        return torch.cat((prefix, slots.flatten(1)), dim=1)

    rows = Rows(
        tokens=joined(
            torch.where(valid, tokens, shape.mask_id), torch.full_like(slot_labels, shape.mask_id)
        ),
        positions=joined(positions, label_index.clamp(min=0)),
        block=joined(block, number),
        limit=joined(limit, block_limit),
    )
    fill, labels = joined(torch.full_like(shifted, -1), fill), joined(labels, slot_labels)
    learned, in_blocks = (
        (part != IGNORED).flatten().nonzero().flatten() for part in (labels, slot_labels)
    )
    previous = joined(tokens, block_previous)
    return Layout(rows, labels, fill, previous, blocks, masks, learned, in_blocks)


def _take(targets: Tensor, index: Tensor, ends: Tensor, otherwise: int) -> Tensor:
    """Returns targets[b, index[b, ...]], `otherwise` for indices outside the output."""
    inside = (index >= 0) & (index < ends[:, :, None])
    flat = index.clamp(0, targets.shape[1] - 1).flatten(1)
    taken = targets.gather(1, flat).view(index.shape)
    return torch.where(inside, taken, otherwise)
