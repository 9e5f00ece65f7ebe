"""Batches: token budget, grouped by length, the same for any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.models.spec_drafter.model import SpecDrafterConfig
from drafttrain.models.spec_drafter.slots import Layout, lay_out

ALIKE = 0.06
"""Rows whose lengths differ by about this share at most count as of the same length."""


@dataclass(frozen=True)
class BatchPlan:
    """Which rows make up batch number g of a training run, for every g.

    Rows are sorted by length with ties in an order of their own each epoch, cut into batches of at
    most `batch_tokens` (rows x longest row), and the batches are shuffled. All of it follows from
    (seed, epoch), so a run can be resumed at any batch and shared out over any number of processes.
    Where source and output are padded apart, a batch costs rows x (longest source + longest
    output), and rows of about the same length are sorted by their sources.
    """

    lengths: np.ndarray
    """[rows], or [rows, 2] of what is padded apart: source and output."""
    batch_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.lengths) == 0:
            raise ValueError("no rows to train on; see the manifest for rows that were left out")
        totals = self._totals()
        longest = int(totals.max())
        if longest > self.batch_tokens:
            raise ValueError(
                f"row {int(totals.argmax())} has {longest} tokens, more than "
                f"train.batch_tokens={self.batch_tokens}; raise it or leave long rows out"
            )

    @property
    def batches_per_epoch(self) -> int:
        return len(self._edges())

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """All batches of an epoch, in order of use."""
        random = np.random.default_rng((self.seed, epoch))
        order = np.lexsort((random.random(len(self.lengths)), *self._sort_keys()))
        batches = [order[start:end] for start, end in self._edges()]
        return [batches[i] for i in random.permutation(len(batches))]

    def stream(self, first: int, last: int) -> Iterator[list[tuple[int, int]]]:
        """(epoch, row) pairs of batches first..last-1, counted over the whole run."""
        per_epoch = self.batches_per_epoch
        epoch, batches = -1, []
        for number in range(first, last):
            if number // per_epoch != epoch:
                epoch = number // per_epoch
                batches = self.epoch(epoch)
            yield [(epoch, int(row)) for row in batches[number % per_epoch]]

    def _edges(self) -> list[tuple[int, int]]:
        lengths = self.lengths[np.lexsort(self._sort_keys())].reshape(len(self.lengths), -1)
        edges, start = [], 0
        longest = lengths[0]
        for end in range(1, len(lengths) + 1):
            if end < len(lengths):
                with_next = np.maximum(longest, lengths[end])
                if with_next.sum() * (end + 1 - start) <= self.batch_tokens:
                    longest = with_next
                    continue
                longest = lengths[end]
            edges.append((start, end))
            start = end
        return edges

    def _totals(self) -> np.ndarray:
        return self.lengths.reshape(len(self.lengths), -1).sum(1)

    def _sort_keys(self) -> tuple[np.ndarray, ...]:
        """Keys of the sorted order, the last one first. Rows with the same keys are as long."""
        totals = self._totals()
        if self.lengths.ndim == 1:
            return (totals,)
        alike = np.floor(np.log(totals) / ALIKE).astype(int)
        sources = self.lengths[:, 0]
        there_and_back = np.where(alike % 2 == 0, sources, -sources)  # no jump between groups
        return totals, there_and_back, alike


def pad(rows: Sequence[Sequence[int]], value: int) -> tuple[Tensor, Tensor]:
    """Right-padded tensor and lengths. Shapes: -> [B, longest], [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.full((len(rows), int(lengths.max())), value)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.as_tensor(row)
    return padded, lengths


@dataclass(frozen=True)
class SlotBatch:
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

    def to(self, device: torch.device) -> SlotBatch:
        return SlotBatch(
            self.input_ids.to(device),
            self.attention_mask.to(device),
            self.layout.to(device),
            self.priority.to(device),
            self.targets.to(device),
        )


@dataclass(frozen=True)
class SlotCollator:
    """Draws prefix lengths and priorities afresh for each (seed, epoch, row)."""

    config: SpecDrafterConfig
    blocks: int
    seed: int

    def __call__(self, examples: Sequence[tuple[int, int, list[int], list[int]]]) -> SlotBatch:
        """Examples are (epoch, row, source_ids, target_ids)."""
        input_ids, source_lengths = pad([e[2] for e in examples], self.config.pad_token_id or 0)
        targets, lengths = pad([e[3] for e in examples], 0)
        mask = torch.arange(input_ids.shape[1]) < source_lengths[:, None]
        prefixes = torch.full((len(examples), self.blocks), -1)
        priority = np.empty((len(examples), self.blocks, self.config.mask_rows), np.float32)
        for i, (epoch, row, _, target) in enumerate(examples):
            random = np.random.default_rng((self.seed, 1, epoch, row))
            count = min(self.blocks, len(target))
            drawn = random.choice(len(target), size=count, replace=False)
            prefixes[i, :count] = torch.from_numpy(drawn)
            priority[i] = random.random(priority.shape[1:], dtype=np.float32)
        layout = lay_out(targets, lengths, prefixes, self.config)
        return SlotBatch(input_ids, mask.long(), layout, torch.from_numpy(priority), targets)


@dataclass(frozen=True)
class PairBatch:
    """Sources and outputs, for ordinary sequence-to-sequence training."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    """[B, T], -100 on padding."""

    def to(self, device: torch.device) -> PairBatch:
        return PairBatch(*(x.to(device) for x in vars(self).values()))


@dataclass(frozen=True)
class PairCollator:
    pad_token_id: int

    def __call__(self, examples: Sequence[tuple[int, int, list[int], list[int]]]) -> PairBatch:
        input_ids, lengths = pad([e[2] for e in examples], self.pad_token_id)
        labels, _ = pad([e[3] for e in examples], -100)
        mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
        return PairBatch(input_ids, mask.long(), labels)


@dataclass(frozen=True)
class TextBatch:
    """Texts for ordinary next-token training."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    """[B, T], -100 on padding."""

    def to(self, device: torch.device) -> TextBatch:
        return TextBatch(*(x.to(device) for x in vars(self).values()))


@dataclass(frozen=True)
class TextCollator:
    """Input and output of each row as one text, all of which is learned."""

    pad_token_id: int

    def __call__(self, examples: Sequence[tuple[int, int, list[int], list[int]]]) -> TextBatch:
        texts = [source + target for _, _, source, target in examples]
        input_ids, lengths = pad(texts, self.pad_token_id)
        labels, _ = pad(texts, -100)
        mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
        return TextBatch(input_ids, mask.long(), labels)
