"""Which rows a Spec-Drafter's decoder reads, what each of them sees, and what it is to predict.

One line holds the whole output of a sentence as prefix rows, followed by any number of blocks of
slots, each after its own prefix length. A block sees the prefix up to its own length and itself, so
one pass trains (or predicts) many blocks (SpecDec trains one a sentence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.models.spec_drafter.shape import DraftShape

IGNORED = -100
"""Label of rows that predict nothing inside the sentence."""
PREFIX = -1
"""Value of `block` for rows of the prefix."""
PADDING = -2
"""Value of `block` for rows that are padding."""


@dataclass(frozen=True)
class Rows:
    """Decoder rows: a prefix and blocks of slots of one sentence. Shapes: all [B, T].

    A prefix row sees prefix rows up to position `limit`; a row of block b sees prefix rows up to
    `limit` and every row of block b, or those up to itself where slots are causal.
    """

    tokens: Tensor
    positions: Tensor
    block: Tensor
    limit: Tensor

    def visible(self, shape: DraftShape, before: Rows | None = None) -> Tensor:
        """[B, T, S] true where row t sees row s of `before` and these rows; padding sees all."""
        keys = self if before is None else self.after(before)
        is_prefix = keys.block == PREFIX
        prefix = is_prefix[:, None, :] & (keys.positions[:, None, :] <= self.limit[:, :, None])
        same = (keys.block[:, None, :] == self.block[:, :, None]) & (self.block >= 0)[:, :, None]
        if shape.slot_attention == "causal":
            same &= keys.positions[:, None, :] <= self.positions[:, :, None]
        seen = prefix | same
        if shape.bidirectional:  # one block: the prefix sees it too
            seen = seen | ((self.block == PREFIX)[:, :, None] & (keys.block == 0)[:, None, :])
        return seen | (self.block == PADDING)[:, :, None]  # no row without a key

    def part(self, start: int, end: int | None = None) -> Rows:
        """Some of the rows, of every line."""
        return Rows(*(value[:, start:end] for value in vars(self).values()))

    def at(self, columns: Tensor) -> Rows:
        """The rows in these columns of each line. Shapes: [B, R]."""
        return Rows(*(value.gather(1, columns) for value in vars(self).values()))

    def after(self, before: Rows) -> Rows:
        """Both, `before` first."""
        pairs = zip(vars(before).values(), vars(self).values(), strict=True)
        return Rows(*(torch.cat(pair, dim=1) for pair in pairs))


def moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """The same value with each of its tensors, also those of dataclasses in it, moved."""
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
    """Token of the sentence at the row's own place, fed when the slot is revealed; -1: none."""
    previous: Tensor
    """Token before the one predicted."""
    blocks: int
    mask_rows: int
    columns: Tensor | None = None
    """[B, R] which block rows are fed, counted from the first of them; None: all."""

    learned: Tensor | None = None
    """[N] places of the labels, counted through [B, T]; found where the layout is made, as looking
    for them on a device would wait for it."""
    learned_in_blocks: Tensor | None = None
    """[N'] the same in the block rows, counted through [B, A, M]."""

    def __post_init__(self) -> None:
        if self.learned is None:
            there = self.labels != IGNORED
            object.__setattr__(self, "learned", there.flatten().nonzero().flatten())
            blocks = there[:, self.prefix_rows :].flatten().nonzero().flatten()
            object.__setattr__(self, "learned_in_blocks", blocks)

    def to(self, device: torch.device) -> Layout:
        return moved(self, lambda tensor: tensor.to(device))

    def only_learned(self, most: int) -> Layout:
        """The same, fed only the slots that predict something, of each sentence the first `most`.

        For causal slots: none of those left out was seen by one that is fed.
        """
        labels = self.labels[:, self.prefix_rows :]
        learned = labels != IGNORED
        learned &= learned.cumsum(1) <= most
        width = int(learned.sum(1).max())
        columns = learned.int().argsort(dim=1, descending=True, stable=True)[:, :width]
        stays = torch.ones_like(self.labels, dtype=torch.bool)
        stays[:, self.prefix_rows :] = learned
        return replace(
            self,
            rows=replace(self.rows, block=self.rows.block.where(stays, PADDING)),
            labels=self.labels.where(stays, IGNORED),
            fill=self.fill.where(stays, -1),
            columns=columns,
            learned=None,
        )

    def fed(self) -> Rows:
        """The block rows that are fed."""
        rows = self.rows.part(self.prefix_rows)
        return rows if self.columns is None else rows.at(self.columns)

    def spread(self, hidden: Tensor) -> Tensor:
        """Hidden states of the fed rows at their places among all block rows, 0 elsewhere.
        Shapes: [B, R, D] -> [B, blocks * mask rows, D]."""
        if self.columns is None:
            return hidden
        every = hidden.new_zeros(len(hidden), self.blocks * self.mask_rows, hidden.shape[-1])
        return every.scatter(1, self.columns[..., None].expand_as(hidden), hidden)

    def of_blocks(self, x: Tensor) -> Tensor:
        """The block rows of [B, T, ...], as [B, A, M, ...]."""
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
    """Rows for sentences y_1..y_L (EOS counted) and blocks of k after y_1..y_p for each p given.

    Every block has exactly k slots, also past the end of the sentence, so that the number of masks
    does not tell its length (SpecDec). Of tokens that every decoding starts from (the first ones,
    as many as `given`) none is to be predicted. Shapes: targets [B, L] padded with anything,
    lengths [B], prefixes [B, A] in given..length-1, or -1 for no block, given [B].
    """
    batch, longest = targets.shape
    blocks, masks, ends = prefixes.shape[1], shape.masks(k), lengths[:, None]
    start = torch.full((batch, 1), start_token)
    shifted = torch.cat((start, targets[:, :-1]), dim=1)

    positions = torch.arange(longest).expand(batch, -1)
    if shape.anchored:
        tokens, labels, previous = shifted, targets, shifted
        valid = positions < ends
    else:
        tokens, labels, previous = targets, torch.full_like(targets, IGNORED), targets
        valid = positions < ends - 1
    limit = positions
    if shape.bidirectional:
        if blocks != 1:
            raise ValueError(
                f"a bidirectional prefix sees its block, so it takes 1 block a sentence, not "
                f"{blocks}; set objective.blocks=1 or drafter.prefix_attention=causal"
            )
        valid = positions < prefixes
        limit = (prefixes - 1).expand_as(positions)
    predicted = valid if given is None else valid & (positions >= given[:, None])
    labels = torch.where(predicted, labels, IGNORED)
    block = torch.where(valid, PREFIX, PADDING)

    # block rows, [B, A, M]: `places` counts tokens of the sentence from 0, y_1 at place 0
    offset = torch.arange(masks)
    after = prefixes[:, :, None]
    exists = (after >= 0).expand(-1, -1, masks)
    slot_places = after + offset + (1 if shape.anchored else 0)  # of the token the row predicts
    own_places = after + offset  # of the token that revealing puts into the row
    block_positions = own_places + (1 if shape.anchored else 0)
    slot_labels = torch.where(exists, _take(targets, slot_places, ends, IGNORED), IGNORED)
    fill = torch.where(exists, _take(targets, own_places, ends, -1), -1)
    # also of the first place past the end, which a draft may go on to after EOS
    before = _take(targets, slot_places - 1, ends, 0)
    block_previous = torch.where(slot_places == 0, start_token, before)
    number = torch.where(exists, torch.arange(blocks)[:, None], PADDING)
    block_limit = (after if shape.anchored else after - 1).expand_as(exists)

    def joined(prefix: Tensor, slots: Tensor) -> Tensor:
        return torch.cat((prefix, slots.flatten(1)), dim=1)

    rows = Rows(
        tokens=joined(
            torch.where(valid, tokens, shape.mask_id), torch.full_like(slot_labels, shape.mask_id)
        ),
        positions=joined(positions, block_positions.clamp(min=0)),
        block=joined(block, number),
        limit=joined(limit, block_limit),
    )
    return Layout(
        rows,
        joined(labels, slot_labels),
        joined(torch.full_like(labels, -1), fill),
        joined(previous, block_previous),
        blocks,
        masks,
    )


def _take(targets: Tensor, places: Tensor, ends: Tensor, otherwise: int) -> Tensor:
    """targets[b, places[b, ...]], `otherwise` where the place lies outside the sentence."""
    inside = (places >= 0) & (places < ends[:, :, None])
    flat = places.clamp(0, targets.shape[1] - 1).flatten(1)
    taken = targets.gather(1, flat).view(places.shape)
    return torch.where(inside, taken, otherwise)
