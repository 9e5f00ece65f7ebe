"""Batches of prompt-and-output texts, followed by mask tokens for blocks (PARD).

A sequence contains the text of one row, or of several packed rows. Only outputs have labels, not
prompts. A block starts after an anchor, a token of the text: the logits at the anchor predict the
block's first token, those at k - 1 masks the others; with k = 1 there are no masks. A mask attends
to the text up to its anchor and to its block's masks up to itself. Masks have the positions that
directly follow the anchor, so their logits equal those of a forward pass on [text up to the anchor,
masks] without the rest. Rows packed into one sequence do not attend to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.batches.examples import Batch, Example, pad
from drafttrain.decoding.engine.forward import additive
from drafttrain.models.spec_drafter.layout import IGNORED

PADDING = -1
"""Document number of padding, which attends to padding only: no attention row is empty."""
NO_ANCHOR = -1
"""Value of `anchors` for tokens that are not masks."""
PADDED = {"positions": 0, "labels": IGNORED, "documents": PADDING}
PADDED |= {"anchors": NO_ANCHOR, "text_columns": 0}
"""Padding value of each field; `input_ids` are padded with the padding token."""
Columns = dict[str, list[int]]
"""Values of the [B, T] fields of a batch for one sequence, by field name."""


@dataclass(frozen=True)
class BlocksBatch(Batch):
    """Sequences of one or several rows, each with its texts first, followed by all its masks.

    Index tensors are computed in the collator: searching on a device would synchronise it.
    """

    input_ids: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T] counted from 0 in each row."""
    labels: Tensor
    """[B, T] the next token; IGNORED on padding and in prompts, except at a prompt's last token if
    the drafter reads prompts itself (`reads_prompt`)."""
    documents: Tensor
    """[B, T] number of the token's row within its sequence, `PADDING` on padding."""
    anchors: Tensor
    """[B, T] position of the last text token that a mask attends to; `NO_ANCHOR` in the text."""
    text_columns: Tensor
    """[B, T] column of the text token at the same position, which has the same label; in the text
    the token's own column."""
    columns: int
    """Number of text columns, including their padding."""
    packed: bool
    """Whether any sequence contains texts of several rows."""
    widths: tuple[int, int]
    """Maximal number of labels in a sequence, and in its texts only; each at least 1."""
    learned: Tensor
    """[N] indices of the labels in the flattened `labels`."""
    text_learned: Tensor
    """[M] indices of the labels of texts in the flattened `labels` of `text`."""
    likeliest: Tensor | None = field(default=None, kw_only=True)
    """[M, k] the target's likeliest tokens at the labels of texts, in order; None: not known."""
    log_probs: Tensor | None = field(default=None, kw_only=True)
    """[M, k] or [M, k + 1] the target's log-probabilities of these tokens (`TopRows`)."""

    @property
    def has_masks(self) -> bool:
        return self.columns < self.input_ids.shape[1]

    def at_labels(self, values: Tensor) -> Tensor:
        """Selects the values at labelled positions. Shapes: [B, T, ...] -> [N, ...]."""
        return values.flatten(0, 1)[self.learned]

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the additive attention mask, 0 or the lowest number, [B, 1, T, T]: texts are
        causal, a mask attends to its text up to the anchor and causally to its block. None if the
        model's own causal mask is enough: one text per sequence, right-padded, without masks."""
        if not (self.has_masks or self.packed):
            return None
        query_anchor, query_position = self.anchors[:, :, None], self.positions[:, :, None]
        key_anchor, key_position = self.anchors[:, None, :], self.positions[:, None, :]
        last = torch.where(query_anchor == NO_ANCHOR, query_position, query_anchor)
        in_block = (query_anchor == key_anchor) & (key_position <= query_position)
        seen = torch.where(key_anchor == NO_ANCHOR, key_position <= last, in_block)
        seen &= self.documents[:, :, None] == self.documents[:, None, :]
        return additive(seen, dtype)[:, None]

    @property
    def text(self) -> BlocksBatch:
        """The batch without masks, as the target reads it."""
        if not self.has_masks:
            return self
        names = ("input_ids", *PADDED)
        texts = {name: getattr(self, name)[:, : self.columns] for name in names}
        return replace(self, **texts, learned=self.text_learned)

    @property
    def depths(self) -> Tensor:
        """[B, T] index in its block, from 0, of the token that each position predicts."""
        return torch.where(self.anchors == NO_ANCHOR, 0, self.positions - self.anchors)

    def slots(self) -> Tensor:
        """Returns the `depths` of the labelled positions. [N]"""
        return self.at_labels(self.depths)

    def same_in_text(self) -> Tensor | slice:
        """Returns the index of each label among the labels of `text`. [N]"""
        if not self.has_masks:
            return slice(None)
        counted = self.labels[:, : self.columns] != IGNORED
        numbers = (counted.flatten().cumsum(0) - 1).view(counted.shape)
        return self.at_labels(numbers.gather(1, self.text_columns.clamp(min=0)))


@dataclass(frozen=True)
class BlocksCollator:
    """Lays out the rows of each sequence, with a block after each token that predicts an output
    token. kept, floor: as in `tasks_of_blocks`, drawn for each (seed, epoch, row)."""

    pad_token_id: int
    mask_token: int = 0
    k: int = 1
    kept: float = 1.0
    floor: float = 1.0
    seed: int = 0
    reads_prompt: bool = True
    """As in `lay_out_texts`; if False, no block starts after a prompt's last token."""

    def __call__(self, sequences: Sequence[Sequence[Example]]) -> BlocksBatch:
        texts = lay_out_texts(sequences, self.reads_prompt)
        masks = [self._lay_out_masks(examples) for examples in sequences]
        tensors = {}
        for name, value in {"input_ids": self.pad_token_id, **PADDED}.items():
            parts = [pad([one[name] for one in part], value)[0] for part in (texts, masks)]
            tensors[name] = torch.cat(parts, dim=1)
        columns = max(len(text["input_ids"]) for text in texts)
        labelled = tensors["labels"] != IGNORED
        of_texts = labelled[:, :columns]
        return BlocksBatch(
            **tensors,
            **known_rows(sequences),
            columns=columns,
            packed=any(len(examples) > 1 for examples in sequences),
            widths=tuple(max(1, int(one.sum(1).max())) for one in (labelled, of_texts)),
            learned=labelled.flatten().nonzero().flatten(),
            text_learned=of_texts.flatten().nonzero().flatten(),
        )

    def alone(self, examples: Sequence[Example]) -> BlocksBatch:
        """Collates examples without packing, one row per sequence."""
        return self([[example] for example in examples])

    def _lay_out_masks(self, examples: Sequence[Example]) -> Columns:
        """Returns the columns of all masks of a sequence."""
        columns: Columns = {name: [] for name in ("input_ids", *PADDED)}
        start = 0  # the first column of the row's text
        for number, example in enumerate(examples):
            random = np.random.default_rng((self.seed, 1, example.epoch, example.row))
            tokens = [*example.source_ids, *example.target_ids]
            first = first_anchor(example, self.reads_prompt)
            tasks = tasks_of_blocks(len(tokens) - 1 - first, self.k, self.kept, self.floor, random)
            for anchor, count in enumerate(tasks.tolist(), first):
                positions = range(anchor + 1, anchor + count)
                columns["input_ids"] += [self.mask_token] * len(positions)
                columns["positions"] += positions
                columns["labels"] += [tokens[position + 1] for position in positions]
                columns["documents"] += [number] * len(positions)
                columns["anchors"] += [anchor] * len(positions)
                columns["text_columns"] += [start + position for position in positions]
            start += len(tokens) - 1
        return columns


def lay_out_texts(
    sequences: Sequence[Sequence[Example]], reads_prompt: bool = True
) -> list[Columns]:
    """Returns the text columns of each sequence. A row's last token is only a label. reads_prompt:
    whether the drafter reads prompts itself and so predicts the output's first token at the
    prompt's last token. Otherwise the target supplies that token."""
    texts = []
    for examples in sequences:
        columns: Columns = {name: [] for name in ("input_ids", *PADDED)}
        for number, example in enumerate(examples):
            tokens = [*example.source_ids, *example.target_ids]
            count, unlearned = len(tokens) - 1, first_anchor(example, reads_prompt)
            columns["input_ids"] += tokens[:-1]
            columns["positions"] += range(count)
            columns["labels"] += [IGNORED] * unlearned + tokens[unlearned + 1 :]
            columns["documents"] += [number] * count
            columns["anchors"] += [NO_ANCHOR] * count
            columns["text_columns"] += range(len(columns["text_columns"]), len(columns["labels"]))
        texts.append(columns)
    return texts


def first_anchor(example: Example, reads_prompt: bool) -> int:
    """Returns the position of the first label: the prompt's last token, or the output's first if
    not reads_prompt."""
    return len(example.source_ids) - (1 if reads_prompt else 0)


def known_rows(sequences: Sequence[Sequence[Example]]) -> dict[str, Tensor]:
    """Concatenates the target's rows of all examples to fields of a batch; empty if any example
    has none."""
    rows = [example.target_rows for examples in sequences for example in examples]
    known = [one for one in rows if one is not None]
    if len(known) < len(rows):
        return {}
    return {
        "likeliest": torch.cat([one.tokens for one in known]),
        "log_probs": torch.cat([one.log_probs for one in known]),
    }


def shares(k: int, kept: float, floor: float) -> np.ndarray:
    """Returns the share of blocks that keep token i = 1..k: kept^(i - 1), at least `floor` (PARD's
    conditional drop). Shapes: -> [k]."""
    return np.maximum(kept ** np.arange(k), floor)


def tasks_of_blocks(
    count: int, k: int, kept: float, floor: float, random: np.random.Generator
) -> np.ndarray:
    """Draws the number of tokens that each block of an output predicts: 1..k, up to its end.

    A block keeps token i only if it keeps token i - 1, so that the masks it attends to exist. The
    blocks are drawn at random, the number for each i from `shares`, rounded up. Shapes: -> [count].
    """
    wanted = np.ceil(shares(k, kept, floor) * count - 1e-9)
    rank = random.permutation(count)
    return np.minimum((rank[:, None] < wanted).sum(1), count - np.arange(count))


def lengths_with_masks(lengths: np.ndarray, k: int, kept: float, floor: float) -> np.ndarray:
    """Returns the maximal number of columns of each row with its masks. Shapes: lengths of prompts
    and outputs [rows, 2] -> [rows]."""
    masks = np.ceil(np.outer(lengths[:, 1], shares(k, kept, floor)[1:]) - 1e-9).sum(1)
    return lengths.sum(1) - 1 + masks.astype(np.int64)


def blocks_of_rows(batch: BlocksBatch, tokens: Tensor, k: int, length: int) -> Tensor:
    """Arranges the predicted tokens of a single row by output prefix, one block for each.

    The last block starts after the last input token. Shapes: tokens [N], one per labelled position
    -> [L, k]; -1 if nothing was predicted.
    """
    blocks = tokens.new_full((length, k), -1)
    slots, positions = batch.slots(), batch.at_labels(batch.positions)
    if len(slots):
        prefixes = positions - slots
        blocks[prefixes - prefixes.max() + length - 1, slots] = tokens
    return blocks
