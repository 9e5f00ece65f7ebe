"""Batches of texts that continue their prompts: one row a sequence, or several packed into one.

In a packed sequence each row sees itself alone, at positions of its own, so that what is computed
of it is what would be computed of it alone. Only the outputs are learned, not the prompts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from drafttrain.data.batches.examples import Batch, Example, Examples, pad
from drafttrain.decoding.engine.forward import additive
from drafttrain.models.spec_drafter.layout import IGNORED

PADDING = -1
"""Document number of padding, which sees itself alone too: no token sees nothing."""
NO_ANCHOR = -1
"""Anchor of what is no mask."""


@dataclass(frozen=True)
class DocumentBatch(Batch):
    """Sequences of one or several rows, and what is learned of them."""

    input_ids: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T] counted from 0 in each row."""
    labels: Tensor
    """[B, T] the token behind each; IGNORED in prompts but at their end (there too where the target
    reads them), and on padding."""
    documents: Tensor | None
    """[B, T] number of the row that a token is of, `PADDING` behind the last one; None where every
    sequence is one row: nothing but padding stands behind it, and no token looks ahead."""
    likeliest: Tensor | None = field(default=None, kw_only=True)
    """[N, k] tokens of the target's rows at the labels of texts, in order; None: not known."""
    log_probs: Tensor | None = field(default=None, kw_only=True)
    """[N, k] or [N, k + 1] the target's log-probabilities of these tokens (`TopRows`)."""
    learned: Tensor = field(default=None, kw_only=True)
    """[N] places of the labels, counted through all sequences. Found where the batch is made:
    looking for them on a device would wait for it."""

    def __post_init__(self) -> None:
        if self.learned is None:
            places = (self.labels.flatten() != IGNORED).nonzero().flatten()
            object.__setattr__(self, "learned", places)

    def at_labels(self, values: Tensor) -> Tensor:
        """What stands at the labels. Shapes: [B, T, ...] -> [N, ...]."""
        return values.flatten(0, 1)[self.learned]

    @property
    def text(self) -> DocumentBatch:
        """The texts alone, as the target reads them."""
        return self

    def same_in_text(self) -> Tensor | slice:
        """Numbers of the labelled positions in `text` with the same labels. [N]"""
        return slice(None)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to attention scores, 0 or the lowest number, [B, 1, T, T]; None: a model's
        own causal mask is right."""
        if self.documents is None:
            return None
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return additive(same.tril(), dtype)[:, None]


@dataclass(frozen=True)
class DocumentCollator:
    """Rows with the target's own outputs, laid out in the sequences that they come in."""

    pad_token_id: int

    def __call__(self, sequences: Sequence[Sequence[Example]]) -> DocumentBatch:
        texts = lay_out_texts(sequences)
        found: dict[str, Any] = padded_columns(texts, self.pad_token_id)
        if all(len(examples) == 1 for examples in sequences):
            found["documents"] = None
        return DocumentBatch(**found, **known_rows(sequences))

    def alone(self, examples: Sequence[Example]) -> DocumentBatch:
        """A sequence for each row."""
        return self([[example] for example in examples])


def known_rows(sequences: Sequence[Sequence[Example]]) -> dict[str, Tensor]:
    """The target's rows at the labelled tokens, one sequence behind the other, where all examples
    have them: fields of a batch."""
    rows = [example.target_rows for examples in sequences for example in examples]
    known = [one for one in rows if one is not None]
    if len(known) < len(rows):
        return {}
    return {
        "likeliest": torch.cat([one.tokens for one in known]),
        "log_probs": torch.cat([one.log_probs for one in known]),
    }


Columns = dict[str, list[int]]
"""Fields of a batch, of one sequence."""
PADDED = {"positions": 0, "labels": IGNORED, "documents": PADDING}
PADDED |= {"anchors": NO_ANCHOR, "places": 0, "before": -1}
"""What padding has, by field; of tokens the padding token."""


def lay_out_texts(
    sequences: Sequence[Sequence[Example]], reads_prompt: bool = True
) -> list[Columns]:
    """Each sequence's texts: all tokens of a row are fed but the last, which is learned only.

    reads_prompt: whether the drafter reads prompts itself, whose last token then predicts the first
    of the output. Where the target reads them, the target tells that token.
    """
    found = []
    for examples in sequences:
        own: Columns = {"input_ids": [], "positions": [], "labels": [], "documents": []}
        for number, example in enumerate(examples):
            tokens = [*example.source_ids, *example.target_ids]
            count, unlearned = len(tokens) - 1, first_anchor(example, reads_prompt)
            own["input_ids"] += tokens[:-1]
            own["positions"] += range(count)
            own["labels"] += [IGNORED] * unlearned + tokens[unlearned + 1 :]
            own["documents"] += [number] * count
        found.append(own)
    return found


def first_anchor(example: Example, reads_prompt: bool) -> int:
    """Position of the first token whose row is learned: the prompt's last, or the output's first
    where the target reads prompts."""
    return len(example.source_ids) - (1 if reads_prompt else 0)


def padded_columns(sequences: Sequence[Columns], pad_token_id: int) -> dict[str, Tensor]:
    """Fields of a batch. Shapes: -> [B, T] each."""
    return {
        name: pad([own[name] for own in sequences], PADDED.get(name, pad_token_id))[0]
        for name in sequences[0]
    }


@dataclass(frozen=True)
class PackedExamples(Dataset):
    """Distilled rows, fetched by (epoch, sequence): each the examples that share a sequence."""

    rows: Examples | Dataset
    sequences: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[list[Example]]:
        wanted = [(epoch, row) for epoch, number in keys for row in self.sequences[number]]
        fetched = iter(self.rows.__getitems__(wanted))
        return [[next(fetched) for _ in self.sequences[number]] for _, number in keys]


def share_sequences(
    rows: Examples | Dataset, lengths: np.ndarray, most: int | None, taught: Sequence[int]
) -> tuple[PackedExamples, np.ndarray]:
    """Rows that are taught, several in a sequence of at most `most` tokens (`pack`) or, without it,
    each in one of its own; and the tokens of each sequence.

    Shapes: lengths [rows] -> [sequences].
    """
    chosen = np.asarray(taught)
    own = [[row] for row in range(len(chosen))] if most is None else pack(lengths[chosen], most)
    sequences = [chosen[places].tolist() for places in own]
    sizes = np.array([lengths[places].sum() for places in sequences])
    return PackedExamples(rows, sequences), sizes


def pack(lengths: np.ndarray, most: int) -> list[list[int]]:
    """Rows that share a sequence of at most so many tokens: the longest first, each where the least
    room is left for it (best fit, decreasing).

    A row that is longer has a sequence of its own. Shapes: lengths [rows].
    """
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, sequence), the fullest first
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(room, (length, -1))
        left, number = room.pop(place) if place < len(room) else (most, len(sequences))
        if number == len(sequences):
            sequences.append([])
        sequences[number].append(row)
        insort(room, (left - length, number))
    return sequences
