"""The backend `engine`: plain decoding with the decoding loop of `generate` and `eval`.

Its outputs equal those of the backend `transformers` but for rounding.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, Decoded, batches_of_rows, sampling_of
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.models.loading import LoadedTarget

BATCHES_AT_ONCE, CLIP_BATCHES_AT_ONCE = 16, 4
"""Batches per call of the engine; fewer for clips, whose features take memory. A row enters when
another ends, so only the last rows of a call decode in a batch that is not full."""


def open_engine(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """Opens the backend `engine`. Raises ValueError if it does not support the target's family."""
    model, chosen, sampling = CachedModel(target.model), config.sampling, sampling_of(config)
    rule = GreedyMatch() if sampling.greedy else RejectionSampling()

    def decode(rows: Sequence[ShardRow]) -> Iterator[tuple[int, Decoded]]:
        def randomness(index: int) -> Randomness:
            return RowRandomness(chosen.seed, rows[index].row)

        decoder = Decoder(model, NoDrafter(), FixedLength(1), rule, sampling, randomness)
        sources = [row.source or make_source(row.source_ids, target.model) for row in rows]
        outputs: dict[int, list[int]] = {index: [] for index in range(len(rows))}
        for round_ in decoder.decode(sources, chosen.max_new_tokens, config.batch_rows):
            outputs[round_.sequence].extend(round_.emitted)
            if round_.finished:
                yield round_.sequence, outputs.pop(round_.sequence)

    def batches(rows: Sequence[ShardRow]) -> list[list[ShardRow]]:
        count = CLIP_BATCHES_AT_ONCE if any(row.encoded for row in rows) else BATCHES_AT_ONCE
        return batches_of_rows(rows, count * config.batch_rows)

    return BatchDecoder("engine", decode, batches)


class RowRandomness(SampledRandomness):
    """Draws tokens with the uniform random numbers of a row: those of the backend `transformers`,
    so both give the same outputs but for rounding."""

    def __init__(self, seed: int, row: int) -> None:
        self._numbers = np.random.default_rng((seed, row))

    def uniform(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self._numbers.random(tuple(like.shape))).to(like)
