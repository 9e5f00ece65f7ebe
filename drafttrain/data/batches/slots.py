"""Batches for Spec-Drafters: sentences with masked blocks at random prefix lengths; glancing.

Glancing (SpecDec Section 3.1.3, after Qian et al. 2021): a first pass without gradient predicts the
masked slots; as many slots as a share of those it got wrong are revealed by feeding the reference
token, and only the rest is trained.
"""

from __future__ import annotations

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
    """[B, S]; [B, 0] of clips."""
    attention_mask: Tensor | None
    """[B, S] 1 where the source is, else 0; None: everywhere."""
    layout: Layout
    priority: Tensor
    """[B, A, M] uniform numbers that choose which slots glancing reveals."""
    targets: Tensor
    """[B, L] whole outputs, padded with 0; what decoding starts from stands in front."""
    given: Tensor
    """[B] how many tokens of each decoding starts from, behind the decoder start token."""
    encoded: Tensor | None = None
    """[B, S, E] what the target's encoder made of the sources, for drafters that read that."""

    @property
    def source(self) -> Tensor:
        """What the drafter reads."""
        return self.input_ids if self.encoded is None else self.encoded


@dataclass(frozen=True)
class SlotCollator:
    """Draws prefix lengths and priorities afresh for each (seed, epoch, row).

    Where slots are causal, those behind a sentence's end are left out, and further blocks drawn
    until as many rows are filled as `blocks` whole ones have; the last one is cut there.
    """

    shape: DraftShape
    k: int
    blocks: int
    seed: int
    start_token: int
    """What the decoder starts from."""
    pad_token: int = 0
    encoded: bool = True
    """Whether examples bring the encoder states that the drafter reads; else they are added on the
    device (`Task.complete`)."""

    def __call__(self, examples: Sequence[Example]) -> SlotBatch:
        examples = [Example(*example) for example in examples]
        input_ids, source_lengths = pad(
            [example.source_ids for example in examples], self.pad_token
        )
        targets, lengths = pad([[*one.given_ids, *one.target_ids] for one in examples], 0)
        given = torch.tensor([len(example.given_ids) for example in examples])
        drawn, priorities = [], []
        for example in examples:
            random = np.random.default_rng((self.seed, 1, example.epoch, example.row))
            drawn.append(self._draw(len(example.target_ids), random))
            shape = len(drawn[-1]), self.shape.masks(self.k)
            priorities.append(random.random(shape, dtype=np.float32))
        most = max(self.blocks, *map(len, drawn))
        prefixes = torch.full((len(examples), most), -1)
        priority = torch.ones(len(examples), most, self.shape.masks(self.k))
        for i, (own, of_slots) in enumerate(zip(drawn, priorities, strict=True)):
            prefixes[i, : len(own)] = torch.from_numpy(own) + given[i]
            priority[i, : len(own)] = torch.from_numpy(of_slots)
        layout = lay_out(targets, lengths, prefixes, self.shape, self.k, self.start_token, given)
        if self._leaves_out:
            layout = layout.only_learned(self.blocks * self.shape.masks(self.k))
        mask, encoded = None, None  # without padding no mask: Transformers would ask the device
        if source_lengths.min() < source_lengths.max():
            mask = padding_mask(source_lengths)
        if self.shape.encoder == "target" and self.encoded:
            encoded, mask = pad_encoded(examples)
        return SlotBatch(input_ids, mask, layout, priority, targets, given, encoded)

    @property
    def _leaves_out(self) -> bool:
        return self.shape.slot_attention == "causal" and self.shape.masks(self.k) > 0

    def _draw(self, length: int, random: np.random.Generator) -> np.ndarray:
        """Prefix lengths of the blocks of an output of this length, each once."""
        if not self._leaves_out:
            return random.choice(length, size=min(self.blocks, length), replace=False)
        drawn = random.permutation(length)
        masks = self.shape.masks(self.k)
        learned = length - drawn - (1 if self.shape.anchored else 0)
        filled = np.minimum(learned, masks).cumsum()
        return drawn[: 1 + np.searchsorted(filled, self.blocks * masks)]


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
