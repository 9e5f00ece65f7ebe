"""Batches for Spec-Drafters: sentences with masked blocks at random prefix lengths; glancing.

Glancing (SpecDec Section 3.1.3, after Qian et al. 2021): a first forward pass without gradient
predicts the masked slots. A number of slots, proportional to the wrong predictions, is revealed by
feeding the reference token; only the other slots enter the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.batches.examples import Batch, Example, pad, pad_encoded, padding_mask
from drafttrain.models.spec_drafter.layout import IGNORED, Layout, lay_out
from drafttrain.models.spec_drafter.shape import DraftShape


@dataclass(frozen=True)
class SlotBatch(Batch):
    """Sentences with masked blocks at random prefix lengths, for `MaskPredict`."""

    input_ids: Tensor
    """[B, S]; [B, 0] for audio clips."""
    attention_mask: Tensor | None
    """[B, S] 1 at source positions, 0 at padding; None: no padding."""
    layout: Layout
    priority: Tensor
    """[B, A, M] uniform random numbers that select the slots glancing reveals."""
    targets: Tensor
    """[B, L] given prefix tokens and the whole output, padded with 0."""
    encoded: Tensor | None = None
    """[B, S, E] the target's encoder states, for drafters that read them."""

    @property
    def source(self) -> Tensor:
        """The drafter's input: the target's encoder states if present, else the source tokens."""
        return self.input_ids if self.encoded is None else self.encoded


@dataclass(frozen=True)
class SlotCollator:
    """Draws random prefix lengths and priorities for each (seed, epoch, row)."""

    shape: DraftShape
    k: int
    blocks: int
    seed: int
    start_token: int
    """The decoder start token."""
    pad_token: int = 0

    def __call__(self, examples: Sequence[Example]) -> SlotBatch:
        examples = [Example(*example) for example in examples]
        input_ids, source_lengths = pad(
            [example.source_ids for example in examples], self.pad_token
        )
        targets, lengths = pad([[*one.given_ids, *one.target_ids] for one in examples], 0)
        given = torch.tensor([len(example.given_ids) for example in examples])
        masks = self.shape.masks(self.k)
        prefixes = torch.full((len(examples), self.blocks), -1)
        priority = torch.ones(len(examples), self.blocks, masks)
        for i, example in enumerate(examples):
            random = np.random.default_rng((self.seed, 1, example.epoch, example.row))
            length = len(example.target_ids)
            blocks = min(self.blocks, length)
            drawn = random.choice(length, size=blocks, replace=False)
            prefixes[i, :blocks] = torch.from_numpy(drawn) + given[i]
            priority[i, :blocks] = torch.from_numpy(random.random((blocks, masks), np.float32))
        layout = lay_out(targets, lengths, prefixes, self.shape, self.k, self.start_token, given)
        mask, encoded = None, None  # no mask without padding: it would synchronise the device
        if source_lengths.min() < source_lengths.max():
            mask = padding_mask(source_lengths)
        if examples[0].encoded is not None:  # else `Task.complete` computes them, if they are read
            encoded, mask = pad_encoded(examples)
        return SlotBatch(input_ids, mask, layout, priority, targets, encoded)


def glancing_ratio(start: float, end: float, progress: float) -> float:
    """Interpolates from start to end; `progress` is 0 at the first training step, 1 at the last."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def choose_revealed(wrong: Tensor, revealable: Tensor, priority: Tensor, ratio: float) -> Tensor:
    """Chooses floor(ratio * wrong slots) slots of each block uniformly, to be revealed.

    Taking the smallest of independent uniform priorities samples uniformly without replacement.
    Shapes: wrong [B, A] counts, revealable [B, A, M] bool, priority [B, A, M] -> [B, A, M] bool.
    """
    count = (wrong * ratio).floor().long()
    order = priority.masked_fill(~revealable, float("inf")).argsort(-1).argsort(-1)
    return (order < count[..., None]) & revealable


def reveal(layout: Layout, revealed: Tensor, anchored: bool) -> tuple[Tensor, Tensor]:
    """Returns tokens and labels after revealing: inputs are reference tokens, their labels ignored.

    In `paper` slots, a row predicts the token at its own position; in `anchored` slots, the row
    before does. Shapes: revealed [B, A, M] bool -> tokens [B, T], labels [B, T].
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
