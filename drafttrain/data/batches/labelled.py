"""Batches for language modelling: tokens and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drafttrain.data.batches.examples import Batch, Example, pad, padding_mask
from drafttrain.models.spec_drafter.slots import IGNORED


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """What is read, and what is learned: outputs of sources, or the texts themselves."""

    input_ids: Tensor
    """[B, S]"""
    attention_mask: Tensor
    """[B, S]"""
    labels: Tensor
    """[B, T], IGNORED on padding."""


@dataclass(frozen=True)
class PairCollator:
    """Sources are read by the encoder, outputs are learned by the decoder."""

    pad_token_id: int

    def __call__(self, examples: Sequence[Example]) -> LabelledBatch:
        sources = [source for _, _, source, *_ in examples]
        targets = [target for _, _, _, target, *_ in examples]
        return _label(sources, targets, self.pad_token_id)


@dataclass(frozen=True)
class TextCollator:
    """Input and output of each row as one text, all of which is learned."""

    pad_token_id: int

    def __call__(self, examples: Sequence[Example]) -> LabelledBatch:
        texts = [source + target for _, _, source, target, *_ in examples]
        return _label(texts, texts, self.pad_token_id)


def _label(
    read: Sequence[Sequence[int]], learned: Sequence[Sequence[int]], pad_token_id: int
) -> LabelledBatch:
    input_ids, lengths = pad(read, pad_token_id)
    labels, _ = pad(learned, IGNORED)
    return LabelledBatch(input_ids, padding_mask(lengths), labels)
