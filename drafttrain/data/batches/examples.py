"""Rows of sources and outputs, as collators are given them, and what they make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import datasets
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from drafttrain.decoding.engine.forward import additive
from drafttrain.models.spec_drafter.layout import IGNORED, moved


class TopRows(NamedTuple):
    """The target's rows at some positions, cut to their likeliest tokens."""

    tokens: Tensor
    """[N, k]"""
    log_probs: Tensor
    """[N, k] of these tokens, or [N, k + 1]: the last is of all others together."""


class Example(NamedTuple):
    """One row in one epoch; what is drawn for it follows from these two numbers."""

    epoch: int
    row: int
    """Index among the rows that are trained on."""
    source_ids: list[int]
    """None of a clip."""
    target_ids: list[int]
    given_ids: list[int] = []
    """What stands between the decoder start token and the output: of a clip its language, task,
    ..."""
    encoded: Tensor | None = None
    """[S, E] what the target's encoder made of the source, for drafters that read that."""
    target_rows: TopRows | None = None
    """The target's rows at the tokens of the output, where they are known."""


Complete = Callable[[list[Example]], list[Example]]
"""Adds to examples what is not in their rows."""


class Examples(Dataset):
    """Distilled rows, fetched a batch at a time by (epoch, row), and completed."""

    def __init__(self, rows: datasets.Dataset, complete: Complete | None = None):
        self.rows, self._complete = rows, complete

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Example]:
        fetched = self.rows[[row for _, row in keys]]
        names = ["source_ids", "target_ids", *(["prefix_ids"] if "prefix_ids" in fetched else [])]
        parts = zip(*(fetched[name] for name in names), strict=True)
        examples = [Example(*key, *own) for key, own in zip(keys, parts, strict=True)]
        return examples if self._complete is None else self._complete(examples)


@dataclass(frozen=True)
class Batch:
    """What a collator makes of some rows; every objective knows the fields of its own."""

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on a device; copies of pinned ones are not waited for."""
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory. Called by `DataLoader`."""
        return moved(self, Tensor.pin_memory)


def pad(rows: Sequence[Sequence[int]], value: int) -> tuple[Tensor, Tensor]:
    """Right-padded tensor and lengths. Shapes: -> [B, longest], [B]."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence(tensors, batch_first=True, padding_value=value), lengths


def pad_encoded(examples: Sequence[Example]) -> tuple[Tensor, Tensor | None]:
    """What encoders put out, padded with zeros, and its mask; None where nothing is padded.

    Shapes: -> [B, longest, E], [B, longest]. Raises ValueError for an example without it.
    """
    rows = [example.encoded for example in examples if example.encoded is not None]
    if len(rows) < len(examples):
        raise ValueError(
            "the drafter reads the target's encoder states, but rows come without them; fetch them "
            "from `Examples` with `text_encoding` or `ClipEncoding`"
        )
    lengths = torch.tensor([len(row) for row in rows])
    padded = pad_sequence(rows, batch_first=True)
    return padded, None if lengths.min() == lengths.max() else padding_mask(lengths)


def padding_mask(lengths: Tensor) -> Tensor:
    """1 where a right-padded row has a token, else 0. Shapes: lengths [B] -> [B, longest]."""
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()


def visible_sources(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What encoders and cross-attention add to scores. Transformers would look at a mask of [B, S]
    first, and so wait for the device. Shapes: [B, S] -> [B, 1, 1, S]."""
    return additive(mask[:, None, None, :] > 0, dtype)


def causal_mask(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores of texts that are one a sequence. Without a mask Transformers would
    look for several, and so wait for the device. Shapes: [B, T] -> [1, 1, T, T]."""
    square = torch.ones(2 * tokens.shape[1:], device=tokens.device)
    return additive(square.tril() > 0, dtype)[None, None]


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """What is read, and what is learned: outputs of sources, or the texts themselves."""

    input_ids: Tensor
    """[B, S]"""
    attention_mask: Tensor
    """[B, S]"""
    labels: Tensor
    """[B, T], IGNORED on padding, and of texts on the first token, which nothing predicts."""
    learned: Tensor
    """[N] places of the labels, counted through all rows; as in `BlocksBatch`."""


@dataclass(frozen=True)
class PairCollator:
    """Sources are read by the encoder, outputs are learned by the decoder; joined, both are one
    text, all of which is learned."""

    pad_token_id: int
    joined: bool = False

    def __call__(self, examples: Sequence[Example]) -> LabelledBatch:
        sources = [source for _, _, source, *_ in examples]
        targets = [target for _, _, _, target, *_ in examples]
        if self.joined:
            sources = targets = [s + t for s, t in zip(sources, targets, strict=True)]
        input_ids, lengths = pad(sources, self.pad_token_id)
        labels, _ = pad(targets, IGNORED)
        if self.joined:
            labels[:, 0] = IGNORED
        learned = (labels.flatten() != IGNORED).nonzero().flatten()
        return LabelledBatch(input_ids, padding_mask(lengths), labels, learned)
