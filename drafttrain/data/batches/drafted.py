"""Rows that a drafter continues itself, and what is learned of its drafts.

A row is cut at a drawn place of its output; from there on the drafter drafts and the target judges,
round by round. Every prefix that was drafted is learned: the committed text with the accepted
drafts, and behind it, as a branch of its own, what was drafted from the first rejected token on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.data.batches.examples import Batch, Example, pad
from drafttrain.data.batches.masked_blocks import NO_ANCHOR, branch_mask
from drafttrain.data.batches.mixing import row_uniforms
from drafttrain.data.batches.packing import PADDING, DocumentBatch, DocumentCollator
from drafttrain.models.spec_drafter.slots import IGNORED


class BegunRow(NamedTuple):
    """A row that is to be continued."""

    epoch: int
    row: int
    """Index among the rows that are trained on; what is drawn follows from these two numbers."""
    tokens: list[int]
    """The prompt and the beginning of the target's own output."""


class DraftedRound(NamedTuple):
    """A round of decoding behind a row's committed tokens."""

    drafted: list[int]
    accepted: int
    """Drafted tokens that were accepted."""
    emitted: list[int]
    """Tokens that were committed: the accepted ones and one more, as far as they count."""


ContinueRows = Callable[[PreTrainedModel, Sequence[BegunRow]], list[list[DraftedRound]]]
"""Decodes on from begun rows with a drafter as it is now; the rounds of each."""


@dataclass(frozen=True)
class OnPolicyBatch(Batch):
    """Rows that are learned as they are, and rows that the drafter continues."""

    whole: DocumentBatch | None
    begun: tuple[BegunRow, ...]

    def to(self, device: torch.device) -> OnPolicyBatch:
        return replace(self, whole=None if self.whole is None else self.whole.to(device))


@dataclass(frozen=True)
class OnPolicyCollator:
    """Cuts a share of the rows somewhere in their outputs. What is drawn for a row depends on
    (seed, epoch, row) alone."""

    collate: DocumentCollator
    share: float
    seed: int = 0

    def __call__(self, sequences: Sequence[Sequence[Example]]) -> OnPolicyBatch:
        whole: list[list[Example]] = []
        begun: list[BegunRow] = []
        for examples in sequences:
            kept = []
            for example in examples:
                place = self.place(example)
                if place is None:
                    kept.append(example)
                    continue
                tokens = [*example.source_ids, *example.target_ids[:place]]
                begun.append(BegunRow(example.epoch, example.row, tokens))
            if kept:
                whole.append(kept)
        return OnPolicyBatch(self.collate(whole) if whole else None, tuple(begun))

    def place(self, example: Example) -> int | None:
        """Tokens of the output that stay, all lengths but the whole alike; None: it is not cut."""
        chosen, place = row_uniforms(self.seed, example.epoch, example.row, 1)[0]
        return int(place * len(example.target_ids)) if chosen < self.share else None


@dataclass(frozen=True)
class DraftsBatch(DocumentBatch):
    """Continued rows, a sequence each: committed text, and behind it the rejected drafts."""

    anchors: Tensor
    """[B, T] position of the last committed token that a rejected draft sees; `NO_ANCHOR` of the
    text."""

    def mask(self, dtype: torch.dtype) -> Tensor:
        return branch_mask(self.anchors, self.positions, self.documents, dtype)


def lay_out_drafts(
    begun: Sequence[BegunRow], rounds: Sequence[Sequence[DraftedRound]]
) -> DraftsBatch:
    """What the drafter drafted, with a label at every prefix that it was asked at: its draft."""
    laid = [lay_out_rounds(row.tokens, own) for row, own in zip(begun, rounds, strict=True)]
    fillers = {"ids": 0, "positions": 0, "labels": IGNORED, "anchors": NO_ANCHOR}
    found = {name: pad([one[name] for one in laid], value)[0] for name, value in fillers.items()}
    documents, _ = pad([[0] * len(one["ids"]) for one in laid], PADDING)
    return DraftsBatch(input_ids=found.pop("ids"), documents=documents, **found)


def lay_out_rounds(tokens: Sequence[int], rounds: Sequence[DraftedRound]) -> dict[str, list[int]]:
    """A continued row as a sequence. The row of a token predicts the draft behind it.

    A round that accepted m of n drafts has labels at the last committed token, at the m accepted
    ones, which are part of the text, and at the rejected ones but the last.
    """
    text = [*tokens, *(token for one in rounds for token in one.emitted)]
    labels = [IGNORED] * len(text)
    branches: dict[str, list[int]] = {"ids": [], "positions": [], "labels": [], "anchors": []}
    last = len(tokens) - 1  # position of the last committed token
    for one in rounds:
        kept = min(one.accepted, len(one.emitted))
        for place, draft in enumerate(one.drafted[: kept + 1]):
            labels[last + place] = draft
        rejected = one.drafted[kept:] if kept < len(one.emitted) else []  # none behind an end
        for place, (draft, behind) in enumerate(zip(rejected, rejected[1:], strict=False), 1):
            branches["ids"].append(draft)
            branches["positions"].append(last + kept + place)
            branches["labels"].append(behind)
            branches["anchors"].append(last + kept)
        last += len(one.emitted)
    count = len(text) - 1  # nothing was drafted behind the last token
    own = {
        "ids": text[:count],
        "positions": list(range(count)),
        "labels": labels[:count],
        "anchors": [NO_ANCHOR] * count,
    }
    return {name: own[name] + branches[name] for name in own}
