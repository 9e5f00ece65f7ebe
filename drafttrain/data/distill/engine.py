"""The backend `engine`: plain decoding with the decoding loop of `generate` and `eval`.

Greedy outputs equal those of the backend `transformers`. Sampled outputs are different samples from
the same distribution; each row has its own random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, batches_of_rows, sampling_of
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import NotFinite
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.models.loading import LoadedTarget

BATCHES_AT_ONCE, CLIP_BATCHES_AT_ONCE = 16, 4
"""Batches per call of the engine; fewer for clips, whose features take memory. A row enters when
another ends, so only the last rows of a call decode in a batch that is not full."""


def open_engine(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """Opens the backend `engine`. Raises ValueError if it does not support the target's family."""
    model, chosen = CachedModel(target.model), config.sampling
    sampling = sampling_of(config)
    rule = GreedyMatch() if sampling.greedy else RejectionSampling()

    def decode(rows: Sequence[ShardRow]) -> list[list[int] | None]:
        """Decodes rows; bisects to find those whose logits are not finite."""

        def randomness(index: int) -> Randomness:
            return sequence_randomness(chosen.seed, rows[index].row, model.device)

        decoder = Decoder(model, NoDrafter(), FixedLength(1), rule, sampling, randomness)
        sources = [row.source or make_source(row.source_ids, target.model) for row in rows]
        try:
            outputs = decoder.decode_all(sources, chosen.max_new_tokens, config.batch_rows)
        except NotFinite:
            if len(rows) == 1:
                return [None]
            half = len(rows) // 2
            return decode(rows[:half]) + decode(rows[half:])
        return [output.tokens for output in outputs]

    def batches(rows: Sequence[ShardRow]) -> list[list[ShardRow]]:
        audio = any(row.encoded for row in rows)
        count = CLIP_BATCHES_AT_ONCE if audio else BATCHES_AT_ONCE
        return batches_of_rows(rows, count * config.batch_rows)

    return BatchDecoder("engine", decode, batches)
