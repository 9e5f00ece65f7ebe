"""Batches for Spec-Drafters: sentences with masked blocks at random prefix lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.batches.examples import Batch, Example, pad, padding_mask
from drafttrain.models.spec_drafter.config import SpecDrafterConfig
from drafttrain.models.spec_drafter.slots import Layout, lay_out


@dataclass(frozen=True)
class SlotBatch(Batch):
    """Sentences with masked blocks at random prefix lengths, for `MaskPredict`."""

    input_ids: Tensor
    """[B, S]"""
    attention_mask: Tensor
    """[B, S]"""
    layout: Layout
    priority: Tensor
    """[B, A, M] uniform numbers that choose which slots glancing reveals."""
    targets: Tensor
    """[B, L] whole outputs, padded with 0."""


@dataclass(frozen=True)
class SlotCollator:
    """Draws prefix lengths and priorities afresh for each (seed, epoch, row)."""

    config: SpecDrafterConfig
    blocks: int
    seed: int

    def __call__(self, examples: Sequence[Example]) -> SlotBatch:
        pad_token = self.config.pad_token_id or 0
        input_ids, source_lengths = pad([source for *_, source, _ in examples], pad_token)
        targets, lengths = pad([target for *_, target in examples], 0)
        prefixes = torch.full((len(examples), self.blocks), -1)
        priority = np.empty((len(examples), self.blocks, self.config.mask_rows), np.float32)
        for i, (epoch, row, _, target) in enumerate(examples):
            random = np.random.default_rng((self.seed, 1, epoch, row))
            count = min(self.blocks, len(target))
            drawn = random.choice(len(target), size=count, replace=False)
            prefixes[i, :count] = torch.from_numpy(drawn)
            priority[i] = random.random(priority.shape[1:], dtype=np.float32)
        layout = lay_out(targets, lengths, prefixes, self.config)
        mask = padding_mask(source_lengths)
        return SlotBatch(input_ids, mask, layout, torch.from_numpy(priority), targets)
