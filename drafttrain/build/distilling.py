"""Distillation by our own engine, with a drafter where one is given.

Greedy outputs are the target's own whatever drafts; sampled ones follow its law, each row by draws
of its own, which are others than those of the backend `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafttrain.build.method import build_method, build_sampling
from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import CheckedDrafters, check_pair, open_pair
from drafttrain.config.commands import DistillConfig
from drafttrain.config.decode import DecodeConfig, SamplingConfig
from drafttrain.config.kinds import NONE
from drafttrain.data.distill.batches import BatchDecoder, batches_of_rows
from drafttrain.data.shards.outputs import Drafting, ShardRow
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.types import NotFinite
from drafttrain.models.identity import hash_weights
from drafttrain.models.loading import LoadedTarget

BATCHES_AT_ONCE = 16
"""Batches handed to the engine at once: rows enter as others end, so that only the last ones of
so many decode in a batch that is not full."""


def decode_settings(config: DistillConfig) -> DecodeConfig:
    """The method that distils. The rule is always lossless: the outputs are to be the target's."""
    sampling = config.sampling
    if config.method == "greedy":
        sampling = SamplingConfig(max_new_tokens=sampling.max_new_tokens, seed=sampling.seed)
    drafter = NONE.name if config.drafter is None else config.drafter
    return DecodeConfig(drafter=drafter, sampling=sampling, stop=config.stop)


def check_engine(config: DistillConfig) -> CheckedDrafters:
    """Refuse a drafter that does not fit the target or the stop policy, before weights are read.

    Raises ValueError as `check_methods` and `check_pair`.
    """
    return check_pair(config.target, *check_methods(decode_settings(config)))


def open_engine(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """The backend `engine`. Loads the drafter; raises ConfigError as `check_engine`."""
    settings, pair = decode_settings(config), open_pair(target, check_engine(config))
    method = build_method(settings, pair)
    sampling, seed = build_sampling(settings.sampling), config.sampling.seed
    decoder = method.decoder(pair.model, sampling, seed)
    rows = RowDecoder(decoder, config.sampling.max_new_tokens, config.batch_rows)
    drafter, name = None, str(settings.drafter)
    if name != NONE.name:
        weights = None if pair.drafter_model is None else hash_weights(pair.drafter_model)
        drafter = Drafting(path=name, weights_sha256=weights, method=method.name)
    facts = {"batch_rows": config.batch_rows, "drafter": drafter}
    return BatchDecoder("engine", rows, rows.batches, facts)


@dataclass(frozen=True)
class RowDecoder:
    """The engine, for rows of a shard: each draws from the stream of its own number."""

    decoder: Decoder
    max_new_tokens: int
    batch_rows: int

    def batches(self, rows: Sequence[ShardRow]) -> list[list[ShardRow]]:
        """Rows that are handed to the engine together, the longest first."""
        audio = any(row.encoded for row in rows)  # features take memory
        return batches_of_rows(rows, (4 if audio else BATCHES_AT_ONCE) * self.batch_rows)

    def __call__(self, rows: Sequence[ShardRow]) -> list[list[int] | None]:
        """As `BatchDecoder.decode`; rows with scores that are not finite are found by halving."""
        numbers = [row.row for row in rows]
        drawing = self.decoder.randomness
        decoder = replace(self.decoder, randomness=lambda index: drawing(numbers[index]))
        model = decoder.target.model
        sources = [row.source or make_source(row.source_ids, model) for row in rows]
        try:
            outputs = decoder.decode_all(sources, self.max_new_tokens, self.batch_rows)
        except NotFinite:
            if len(rows) == 1:
                return [None]
            half = len(rows) // 2
            return self(rows[:half]) + self(rows[half:])
        return [output.tokens for output in outputs]
