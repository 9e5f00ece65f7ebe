"""The backend `engine`: plain decoding by the loop that `generate` and `eval` decode with.

Greedy outputs are those of the backend `transformers`; sampled ones follow the same distribution,
each row by random numbers of its own, but are different samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, batches_of_rows
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.architectures import check_configuration
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import NotFinite, Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.models.loading import LoadedTarget, check_target

BATCHES_AT_ONCE, CLIP_BATCHES_AT_ONCE = 16, 4
"""Batches handed to the engine at once, of clips fewer, whose features take memory: rows enter as
others end, so that only the last ones decode in a batch that is not full."""


def check_engine(config: DistillConfig) -> None:
    """Raises ValueError for a family that the engine cannot run, before weights are read."""
    check_configuration(check_target(config.target))


def open_engine(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """The target with the engine around it. Raises ValueError as `check_engine`."""
    check_engine(config)
    model, chosen = CachedModel(target.model), config.sampling
    sampling, rule = Sampling(), GreedyMatch()
    if config.method == "sample":
        sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p)
        rule = RejectionSampling()

    def decode(rows: Sequence[ShardRow]) -> list[list[int] | None]:
        """Rows with scores that are not finite are found by halving."""

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
