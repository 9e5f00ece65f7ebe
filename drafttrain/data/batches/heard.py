"""Batches for decoders that share the target's encoder: its output, and the tokens behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drafttrain.data.batches.examples import Batch, Example, pad, pad_encoded
from drafttrain.models.spec_drafter.slots import IGNORED


@dataclass(frozen=True)
class HeardBatch(Batch):
    """What the target's encoder made of clips, and the outputs that a decoder learns to give."""

    encoded: Tensor
    """[B, S, E]; all clips are as long for the encoder."""
    input_ids: Tensor
    """[B, T] what the decoder is fed: all that stands in front of each label."""
    labels: Tensor
    """[B, T] IGNORED on padding, and where the target is given its next token."""


@dataclass(frozen=True)
class HeardCollator:
    """Clips with the target's own outputs."""

    start_token: int
    """What the decoder starts from; what an example is given stands behind it."""

    def __call__(self, examples: Sequence[Example]) -> HeardBatch:
        """Raises ValueError for examples without what the encoder put out."""
        encoded, mask = pad_encoded(examples)
        if mask is not None:
            raise ValueError(
                "the encoder's outputs of a batch differ in length, but a Whisper decoder reads "
                "all of them; encode the clips as the target does, padded to 30 s"
            )
        fed, learned = [], []
        for example in examples:
            given = [self.start_token, *example.given_ids]
            fed.append(given + example.target_ids[:-1])
            learned.append([IGNORED] * (len(given) - 1) + example.target_ids)
        input_ids, _ = pad(fed, self.start_token)
        labels, _ = pad(learned, IGNORED)
        return HeardBatch(encoded, input_ids, labels)
