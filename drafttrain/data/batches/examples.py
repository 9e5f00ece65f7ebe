"""Training examples of source and output, base class for batches, and padding functions."""

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
    """The target's distributions at N positions, reduced to the k likeliest tokens."""

    tokens: Tensor
    """[N, k]"""
    log_probs: Tensor
    """[N, k] of these tokens, or [N, k + 1]: the last column is for all other tokens together."""


def merged_rows(log_probs: Tensor, indices: Tensor, merge: bool = True) -> Tensor:
    """Selects the log-probabilities at these indices; if merge, appends a column for all others
    together. Shapes: log_probs [N, C], indices [N, k] -> [N, k] or [N, k + 1]."""
    chosen = log_probs.gather(1, indices)
    if not merge:
        return chosen
    others = log_probs.scatter(1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], dim=1)


class Example(NamedTuple):
    """One row in one epoch, the seeds of its random draws."""

    epoch: int
    row: int
    """Index among the training rows."""
    source_ids: list[int]
    """Empty for an audio clip."""
    target_ids: list[int]
    given_ids: list[int] = []
    """Tokens between decoder start token and output; for an audio clip: language, task, ..."""
    encoded: Tensor | None = None
    """[S, E] the target's encoder states, for drafters that read them."""
    target_rows: TopRows | None = None
    """The target's distributions for the tokens of the output; None: not known."""


Complete = Callable[[list[Example]], list[Example]]
"""Adds fields to examples that are not stored in their rows."""


class Examples(Dataset):
    """Distilled rows, fetched one batch at a time by (epoch, row), then completed if needed."""

    def __init__(self, rows: datasets.Dataset, complete: Complete | None = None):
        self.rows, self._complete = rows, complete

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Example]:
        fetched = self.rows[[row for _, row in keys]]
        names = ("source_ids", "target_ids", "prefix_ids")  # the last only of clips
        parts = zip(*(fetched[name] for name in names if name in fetched), strict=True)
        examples = [Example(*key, *own) for key, own in zip(keys, parts, strict=True)]
        return examples if self._complete is None else self._complete(examples)


@dataclass(frozen=True)
class Batch:
    """Base class for the collated batches; each objective has its own subclass with fields."""

    def to(self, device: torch.device) -> Self:
        """Moves all tensors to a device; pinned tensors are copied asynchronously."""
        return moved(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Moves all tensors to page-locked memory. Called by `DataLoader`."""
        return moved(self, Tensor.pin_memory)


def pad(rows: Sequence[Sequence[int]], value: int) -> tuple[Tensor, Tensor]:
    """Right-pads rows; returns tensor and lengths. Shapes: -> [B, longest], [B]."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence(tensors, batch_first=True, padding_value=value), lengths


def pad_encoded(examples: Sequence[Example]) -> tuple[Tensor, Tensor | None]:
    """Returns the encoder states [B, longest, E], padded with zeros, and their mask [B, longest];
    None if nothing is padded."""
    rows = [example.encoded for example in examples]
    lengths = torch.tensor([len(row) for row in rows])
    padded = pad_sequence(rows, batch_first=True)
    return padded, None if lengths.min() == lengths.max() else padding_mask(lengths)


def padding_mask(lengths: Tensor) -> Tensor:
    """Returns 1 at tokens, 0 at right padding. Shapes: lengths [B] -> [B, longest]."""
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()


def causal_mask(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the additive causal mask for one text per sequence. Shapes: [B, T] -> [B, 1, T, T].
    Without a mask, Transformers would look for packed texts: a device synchronisation."""
    square = torch.ones(2 * tokens.shape[1:], device=tokens.device)
    return additive(square.tril() > 0, dtype).expand(len(tokens), 1, -1, -1)


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """Input tokens and labels: sources with their outputs, or texts with themselves as labels."""

    input_ids: Tensor
    """[B, S]"""
    attention_mask: Tensor
    """[B, S]"""
    labels: Tensor
    """[B, T], IGNORED on padding; in texts also on the first token, which nothing predicts."""
    learned: Tensor
    """[N] indices of the labels in the flattened `labels`, as in `BlocksBatch`."""


@dataclass(frozen=True)
class PairCollator:
    """Puts sources into `input_ids` and outputs into `labels`; if joined, both get the text of
    source and output."""

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
