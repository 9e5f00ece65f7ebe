"""Batches of texts that continue their prompts, and behind them the masks of blocks (PARD).

A sequence holds the text of one row, or of several packed into one; only outputs are learned, not
prompts. A block begins behind an anchor, a token of the text: the anchor's own row predicts the
first token, the row of each of k - 1 masks another one; with k = 1 there are texts alone. A mask
sees the text up to its anchor and the masks of its block up to itself, at the positions that they
would have without the rest of the text, so that its row is what the model says of [text up to the
anchor, masks] alone. Rows that share a sequence do not see each other.
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
"""Document number of padding, which sees itself alone: no token sees nothing."""
NO_ANCHOR = -1
"""Anchor of what is no mask."""
PADDED = {"positions": 0, "labels": IGNORED, "documents": PADDING}
PADDED |= {"anchors": NO_ANCHOR, "places": 0, "before": -1}
"""What padding has, by field; of tokens the padding token."""
Columns = dict[str, list[int]]
"""Fields of a batch, of one sequence."""


@dataclass(frozen=True)
class BlocksBatch(Batch):
    """Sequences of one or several rows, each with its texts first and all masks behind them.

    What is looked for in a batch is found where it is made: looking for it on a device would wait
    for it.
    """

    input_ids: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T] counted from 0 in each row."""
    labels: Tensor
    """[B, T] the token behind each; IGNORED in prompts but at their end (there too where the target
    reads them), and on padding."""
    documents: Tensor
    """[B, T] number of the row that a token is of, `PADDING` behind the last one."""
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
    packed: bool
    """Whether a sequence has texts of several rows."""
    widths: tuple[int, int]
    """Most labels of a sequence, and most of its texts, 1 at least."""
    learned: Tensor
    """[N] places of the labels, counted through all sequences."""
    text_learned: Tensor
    """[M] places of the labels of texts, counted through `text`."""
    likeliest: Tensor | None = field(default=None, kw_only=True)
    """[M, k] tokens of the target's rows at the labels of texts, in order; None: not known."""
    log_probs: Tensor | None = field(default=None, kw_only=True)
    """[M, k] or [M, k + 1] the target's log-probabilities of these tokens (`TopRows`)."""

    @property
    def has_masks(self) -> bool:
        return self.columns < self.input_ids.shape[1]

    def at_labels(self, values: Tensor) -> Tensor:
        """What stands at the labels. Shapes: [B, T, ...] -> [N, ...]."""
        return values.flatten(0, 1)[self.learned]

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to attention scores, 0 or the lowest number, [B, 1, T, T]: a text sees
        itself, a block its text up to the anchor and itself. None where a model's own causal mask
        is right: no token looks ahead to padding."""
        if not (self.has_masks or self.packed):
            return None
        mine, own = self.anchors[:, :, None], self.positions[:, :, None]
        theirs, position = self.anchors[:, None, :], self.positions[:, None, :]
        last = torch.where(mine == NO_ANCHOR, own, mine)
        in_block = (mine == theirs) & (position <= own)
        seen = torch.where(theirs == NO_ANCHOR, position <= last, in_block)
        seen &= self.documents[:, :, None] == self.documents[:, None, :]
        return additive(seen, dtype)[:, None]

    @property
    def text(self) -> BlocksBatch:
        """The texts alone, as the target reads them."""
        if not self.has_masks:
            return self
        names = "input_ids", "positions", "labels", "documents", "anchors", "places", "before"
        texts = {name: getattr(self, name)[:, : self.columns] for name in names}
        return replace(self, **texts, learned=self.text_learned)

    def slots(self) -> Tensor:
        """Of each labelled position, which token of its block it predicts, counted from 0. [N]"""
        depths = torch.where(self.before < 0, 0, self.positions - self.anchors)
        return self.at_labels(depths)

    def same_in_text(self) -> Tensor | slice:
        """Numbers of the labelled positions in `text` with the same labels. [N]"""
        if not self.has_masks:
            return slice(None)
        counted = self.labels[:, : self.columns] != IGNORED
        numbers = (counted.flatten().cumsum(0) - 1).view(counted.shape)
        return self.at_labels(numbers.gather(1, self.places.clamp(min=0)))


@dataclass(frozen=True)
class BlocksCollator:
    """Rows with the target's own outputs, laid out in the sequences that they come in, and a block
    behind each token that predicts one of them.

    kept, floor: as `tasks_of_blocks`. What is dropped is drawn afresh for each (seed, epoch, row).
    """

    pad_token_id: int
    mask_token: int = 0
    k: int = 1
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
        found = {
            name: pad([own[name] for own in texts], PADDED.get(name, self.pad_token_id))[0]
            for name in texts[0]
        }
        labelled = found["labels"] != IGNORED
        of_texts = labelled[:, :columns]
        return BlocksBatch(
            **found,
            **known_rows(sequences),
            columns=columns,
            packed=any(len(examples) > 1 for examples in sequences),
            widths=tuple(max(1, int(one.sum(1).max())) for one in (labelled, of_texts)),
            learned=labelled.flatten().nonzero().flatten(),
            text_learned=of_texts.flatten().nonzero().flatten(),
        )

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
