"""Batches for parallel drafters: texts, and behind them the masks of many blocks (PARD).

A block begins behind an anchor, a token of the text: the anchor's own row predicts the first token,
the row of each of k - 1 masks another one. A mask sees the text up to its anchor and the masks of
its block up to itself, at the positions that they would have without the rest of the text, so that
its row is what the model says of [text up to the anchor, masks] alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.packing import (
    NO_ANCHOR,
    PADDED,
    Columns,
    DocumentBatch,
    first_anchor,
    known_rows,
    lay_out_texts,
    padded_columns,
)
from drafttrain.decoding.engine.forward import additive
from drafttrain.models.spec_drafter.layout import IGNORED


@dataclass(frozen=True)
class BlocksBatch(DocumentBatch):
    """Sequences of one or several rows, each with its texts first and all masks behind them."""

    anchors: Tensor
    """[B, T] position of the last token of the text that a mask sees; `NO_ANCHOR` of the text."""
    places: Tensor
    """[B, T] column of the text's token at the same position, whose row has the same label; of the
    text its own."""
    before: Tensor
    """[B, T] column whose row predicts the token before, in the same block: of a block's first mask
    the anchor's; -1 of the text, whose rows predict the first tokens of blocks."""
    columns: int
    """Columns of the texts, with their padding."""
    text_learned: Tensor = field(default=None, kw_only=True)
    """[M] places of the labels of texts, counted through `text`."""
    packed: bool = field(default=False, kw_only=True)
    """Whether a sequence has texts of several rows."""
    widths: tuple[int, int] = field(default=(1, 1), kw_only=True)
    """Most labels of a sequence, and most of its texts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_learned is None:
            labelled = self.labels != IGNORED
            texts = labelled[:, : self.columns]
            found = {
                "text_learned": texts.flatten().nonzero().flatten(),
                "packed": int(self.documents.max()) > 0,
                "widths": tuple(max(1, int(one.sum(1).max())) for one in (labelled, texts)),
            }
            for name, value in found.items():
                object.__setattr__(self, name, value)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """What is added to attention scores, 0 or the lowest number, [B, 1, T, T]: a text sees
        itself, a block its text up to the anchor and itself."""
        mine, own = self.anchors[:, :, None], self.positions[:, :, None]
        theirs, position = self.anchors[:, None, :], self.positions[:, None, :]
        last = torch.where(mine == NO_ANCHOR, own, mine)
        in_block = (mine == theirs) & (position <= own)
        seen = torch.where(theirs == NO_ANCHOR, position <= last, in_block)
        seen &= self.documents[:, :, None] == self.documents[:, None, :]
        return additive(seen, dtype)[:, None]

    @property
    def text(self) -> DocumentBatch:
        fields = (self.input_ids, self.positions, self.labels, self.documents)
        ids, positions, labels, documents = (field[:, : self.columns] for field in fields)
        documents = documents if self.packed else None
        known = {"likeliest": self.likeliest, "log_probs": self.log_probs}
        known |= {"learned": self.text_learned}
        return DocumentBatch(ids, positions, labels, documents, **known)

    def slots(self) -> Tensor:
        """Of each labelled position, which token of its block it predicts, counted from 0. [N]"""
        depths = torch.where(self.before < 0, 0, self.positions - self.anchors)
        return self.at_labels(depths)

    def same_in_text(self) -> Tensor:
        counted = self.labels[:, : self.columns] != IGNORED
        numbers = (counted.flatten().cumsum(0) - 1).view(counted.shape)
        return self.at_labels(numbers.gather(1, self.places.clamp(min=0)))


@dataclass(frozen=True)
class BlocksCollator:
    """Rows with the target's own outputs, and a block behind each token that predicts one of them.

    kept, floor: as `tasks_of_blocks`. What is dropped is drawn afresh for each (seed, epoch, row).
    """

    pad_token_id: int
    mask_token: int
    k: int
    kept: float = 1.0
    floor: float = 1.0
    seed: int = 0
    reads_prompt: bool = True
    """As `lay_out_texts`: where the target reads prompts, no block begins behind their last one."""

    def __call__(self, sequences: Sequence[Sequence[Example]]) -> BlocksBatch:
        texts = lay_out_texts(sequences, self.reads_prompt)
        columns = max(len(own["input_ids"]) for own in texts)
        for own, examples in zip(texts, sequences, strict=True):
            count = len(own["input_ids"])
            own |= {"anchors": [NO_ANCHOR] * count, "before": [-1] * count}
            own["places"] = list(range(count))
            for name, values in own.items():
                values += [PADDED.get(name, self.pad_token_id)] * (columns - count)
            start = 0
            for number, example in enumerate(examples):
                self._add_masks(own, example, number, start)
                start += len(example.source_ids) + len(example.target_ids) - 1
        found = padded_columns(texts, self.pad_token_id)
        return BlocksBatch(**found, **known_rows(sequences), columns=columns)

    def alone(self, examples: Sequence[Example]) -> BlocksBatch:
        """A sequence for each row."""
        return self([[example] for example in examples])

    def _add_masks(self, own: Columns, example: Example, number: int, start: int) -> None:
        """Put the masks of a row behind what is there; its text begins at column `start`."""
        random = np.random.default_rng((self.seed, 1, example.epoch, example.row))
        tokens = [*example.source_ids, *example.target_ids]
        first = first_anchor(example, self.reads_prompt)
        tasks = tasks_of_blocks(len(tokens) - 1 - first, self.k, self.kept, self.floor, random)
        for anchor, count in enumerate(tasks.tolist(), first):
            before = start + anchor
            for position in range(anchor + 1, anchor + count):
                own["before"].append(before)
                before = len(own["input_ids"])
                own["input_ids"].append(self.mask_token)
                own["positions"].append(position)
                own["labels"].append(tokens[position + 1])
                own["documents"].append(number)
                own["anchors"].append(anchor)
                own["places"].append(start + position)


def shares(k: int, kept: float, floor: float) -> np.ndarray:
    """Share of the blocks that have a token number 1..k: kept^(i - 1), at least `floor` (PARD's
    conditional drop). Shapes: -> [k]."""
    return np.maximum(kept ** np.arange(k), floor)


def tasks_of_blocks(
    count: int, k: int, kept: float, floor: float, random: np.random.Generator
) -> np.ndarray:
    """How many tokens each of the blocks of an output learns: 1..k, at most to the output's end.

    A block has a token number i only if it has one before, so that the masks it sees are there; the
    blocks that have are drawn at random, in their `shares`, rounded up. Shapes: -> [count].
    """
    wanted = np.ceil(shares(k, kept, floor) * count - 1e-9)
    rank = random.permutation(count)
    return np.minimum((rank[:, None] < wanted).sum(1), count - np.arange(count))


def lengths_with_masks(lengths: np.ndarray, k: int, kept: float, floor: float) -> np.ndarray:
    """Columns that rows take, at most. Shapes: of prompts and outputs [rows, 2] -> [rows]."""
    masks = np.ceil(np.outer(lengths[:, 1], shares(k, kept, floor)[1:]) - 1e-9).sum(1)
    return lengths.sum(1) - 1 + masks.astype(np.int64)


def blocks_of_rows(batch: BlocksBatch, tokens: Tensor, k: int, length: int) -> Tensor:
    """What was predicted of a single row's output of this length, a block at each of its prefixes.

    The last block begins behind the last token that is fed. Shapes: tokens [N], one a labelled
    position -> [L, k]; -1 where nothing was.
    """
    blocks = tokens.new_full((length, k), -1)
    slots, positions = batch.slots(), batch.at_labels(batch.positions)
    if len(slots):
        prefixes = positions - slots
        blocks[prefixes - prefixes.max() + length - 1, slots] = tokens
    return blocks
