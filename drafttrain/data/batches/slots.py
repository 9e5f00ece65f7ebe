"""Batches for Spec-Drafters: sentences with masked blocks at random prefix lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.batches.examples import Batch, Example, pad, pad_encoded, padding_mask
from drafttrain.models.spec_drafter.config import SpecDrafterConfig
from drafttrain.models.spec_drafter.slots import Layout, lay_out


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

    config: SpecDrafterConfig
    blocks: int
    seed: int

    def __call__(self, examples: Sequence[Example]) -> SlotBatch:
        examples = [Example(*example) for example in examples]
        input_ids, source_lengths = pad(
            [example.source_ids for example in examples], self.config.pad_token_id or 0
        )
        targets, lengths = pad([[*one.given_ids, *one.target_ids] for one in examples], 0)
        given = torch.tensor([len(example.given_ids) for example in examples])
        drawn, priorities = [], []
        for example in examples:
            random = np.random.default_rng((self.seed, 1, example.epoch, example.row))
            drawn.append(self._draw(len(example.target_ids), random))
            shape = len(drawn[-1]), self.config.mask_rows
            priorities.append(random.random(shape, dtype=np.float32))
        most = max(self.blocks, *map(len, drawn))
        prefixes = torch.full((len(examples), most), -1)
        priority = np.ones((len(examples), most, self.config.mask_rows), np.float32)
        for i, (own, of_slots) in enumerate(zip(drawn, priorities, strict=True)):
            prefixes[i, : len(own)] = torch.from_numpy(own) + given[i]
            priority[i, : len(own)] = of_slots
        layout = lay_out(targets, lengths, prefixes, self.config, given)
        if self._leaves_out:
            layout = layout.only_learned(self.blocks * self.config.mask_rows)
        mask, encoded = padding_mask(source_lengths), None
        if self.config.encoder == "target":
            encoded, mask = pad_encoded(examples)
        numbers = torch.from_numpy(priority)
        return SlotBatch(input_ids, mask, layout, numbers, targets, given, encoded)

    @property
    def _leaves_out(self) -> bool:
        return self.config.slot_attention == "causal" and self.config.mask_rows > 0

    def _draw(self, length: int, random: np.random.Generator) -> np.ndarray:
        """Prefix lengths of the blocks of an output of this length, each once."""
        if not self._leaves_out:
            return random.choice(length, size=min(self.blocks, length), replace=False)
        drawn = random.permutation(length)
        masks = self.config.mask_rows
        learned = length - drawn - (1 if self.config.slots == "anchored" else 0)
        filled = np.minimum(learned, masks).cumsum()
        return drawn[: 1 + np.searchsorted(filled, self.blocks * masks)]
