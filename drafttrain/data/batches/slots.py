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
    encoded: Tensor | None = None
    """[B, S, E] what the target's encoder made of the sources, for drafters that read that."""

    @property
    def source(self) -> Tensor:
        """What the drafter reads."""
        return self.input_ids if self.encoded is None else self.encoded


@dataclass(frozen=True)
class SlotCollator:
    """Draws prefix lengths and priorities afresh for each (seed, epoch, row)."""

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
        prefixes = torch.full((len(examples), self.blocks), -1)
        priority = np.empty((len(examples), self.blocks, self.config.mask_rows), np.float32)
        for i, example in enumerate(examples):
            random = np.random.default_rng((self.seed, 1, example.epoch, example.row))
            length = len(example.target_ids)
            count = min(self.blocks, length)
            drawn = random.choice(length, size=count, replace=False)
            prefixes[i, :count] = torch.from_numpy(drawn) + given[i]
            priority[i] = random.random(priority.shape[1:], dtype=np.float32)
        layout = lay_out(targets, lengths, prefixes, self.config, given)
        mask, encoded = padding_mask(source_lengths), None
        if self.config.encoder == "target":
            encoded, mask = pad_encoded(examples)
        return SlotBatch(input_ids, mask, layout, torch.from_numpy(priority), targets, encoded)
