"""Where the rows of Spec-Drafter's decoder stand and what each of them is to predict.

One line holds the whole output of a sentence as prefix rows, followed by any number of blocks of
slots, each at its own prefix length. A block sees the prefix up to its own length and itself, so
one pass trains (or predicts) many blocks (SpecDec trains one a sentence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.models.spec_drafter.model import SpecDrafterConfig
from drafttrain.models.spec_drafter.rows import PADDING, PREFIX, Rows

IGNORED = -100
"""Label of rows that predict nothing inside the sentence."""


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
    """Decoder rows and what belongs to them. T = prefix rows + blocks * mask rows; all [B, T]."""

    rows: Rows
    labels: Tensor
    """Token that the row predicts; IGNORED on padding, past EOS, and on unshifted prefix rows."""
    fill: Tensor
    """Token of the sentence at the row's own place, fed when the slot is revealed; -1: none."""
    previous: Tensor
    """Token before the one predicted; `no_token` where the row is not to be told it."""
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
        """What was made of the rows that are fed, where they stand among all block rows; the others
        are 0. Shapes: [B, R, D] -> [B, blocks * mask rows, D]."""
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
    config: SpecDrafterConfig,
    given: Tensor | None = None,
) -> Layout:
    """Rows for sentences y_1..y_L (EOS counted) and blocks after y_1..y_p for each p given.

    Every block has exactly k slots, also past the end of the sentence, so that the number of masks
    does not tell its length (SpecDec). Of tokens that every decoding starts from (the first ones,
    as many as `given`) none is to be predicted. Shapes: targets [B, L] padded with anything,
    lengths [B], prefixes [B, A] in given..length-1, or -1 for no block, given [B].
    """
    batch, longest = targets.shape
    blocks, masks = prefixes.shape[1], config.mask_rows
    anchored = config.slots == "anchored"
    ends = lengths[:, None]
    start = torch.full((batch, 1), config.decoder_start_token_id)
    shifted = torch.cat((start, targets[:, :-1]), dim=1)

    positions = torch.arange(longest).expand(batch, -1)
    if anchored:
        tokens, labels, previous = shifted, targets, shifted
        valid = positions < ends
    else:
        tokens, labels, previous = targets, torch.full_like(targets, IGNORED), targets
        valid = positions < ends - 1
    limit = positions
    if config.prefix_attention == "bidirectional":
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
    slot_places = after + offset + (1 if anchored else 0)  # place of the token the row predicts
    own_places = after + offset  # place of the token that revealing puts into the row
    block_positions = own_places + (1 if anchored else 0)
    slot_labels = torch.where(exists, _take(targets, slot_places, ends, IGNORED), IGNORED)
    fill = torch.where(exists, _take(targets, own_places, ends, -1), -1)
    # also of the first place past the end, which a draft may go on to after EOS
    before = _take(targets, slot_places - 1, ends, 0)
    block_previous = torch.where(slot_places == 0, config.decoder_start_token_id, before)
    number = torch.where(exists, torch.arange(blocks)[:, None], PADDING)
    block_limit = (after if anchored else after - 1).expand_as(exists)
    slot_tokens = torch.full_like(slot_labels, config.mask_id)
    if config.feeds_first and masks:  # the block's first token is known, its slot no mask
        first = fill[..., 0].clone()
        slot_tokens[..., 0] = first.where(first >= 0, config.mask_id)
        fill[..., 0] = -1  # nothing left to reveal there

    def joined(prefix: Tensor, slots: Tensor) -> Tensor:
        return torch.cat((prefix, slots.flatten(1)), dim=1)

    rows = Rows(
        tokens=joined(torch.where(valid, tokens, config.mask_id), slot_tokens),
        positions=joined(positions, block_positions.clamp(min=0)),
        block=joined(block, number),
        limit=joined(limit, block_limit),
    )
    none = torch.full_like(labels, -1)
    if config.slot_weights == "own":  # rows of tokens predict as the target's do
        previous = torch.full_like(previous, config.no_token)
    return Layout(
        rows,
        joined(labels, slot_labels),
        joined(none, fill),
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
