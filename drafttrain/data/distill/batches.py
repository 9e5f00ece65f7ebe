"""The interface of distillation backends, and batching of rows by length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from drafttrain.config.commands import DistillConfig
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.types import Sampling

Decoded = list[int] | Refused | None
"""A row's output tokens with EOS, without padding; None: its logits were not finite."""


@dataclass(frozen=True)
class BatchDecoder:
    """A target that decodes batches of rows with one of the backends."""

    backend: str
    """Name of the backend in `BACKENDS`."""
    decode: Callable[[Sequence[ShardRow]], Iterable[tuple[int, Decoded]]]
    """Yields the index and output of each row, in any order, as early as it is known. Raises
    OutOfMemoryError for a batch that is too large, and may raise NotFinite for the rest of one."""
    batches: Callable[[Sequence[ShardRow]], Iterable[list[ShardRow]]]
    """Splits the rows of a shard into batches. A row's output does not depend on its batch."""
    served_model: str | None = None
    """The server's name for the target."""


def sampling_of(config: DistillConfig) -> Sampling:
    """Returns how the target decodes; beams count as greedy."""
    return Sampling.of(config.sampling) if config.method == "sample" else Sampling()


def batches_by_length(
    rows: Sequence[ShardRow], batch_tokens: int, equal: bool = False
) -> Iterator[list[ShardRow]]:
    """Yields batches, longest rows first: rows x longest row <= batch_tokens, but at least one row.
    equal: put only rows of equal length into a batch, so that none is padded."""
    ordered = sorted(rows, key=lambda row: (-row.length, row.row))
    while ordered:
        longest = ordered[0].length
        fit = max(1, batch_tokens // longest)
        if equal:
            fit = min(fit, sum(row.length == longest for row in ordered[:fit]))
        yield ordered[:fit]
        ordered = ordered[fit:]


def batches_of_rows(rows: Sequence[ShardRow], count: int) -> list[list[ShardRow]]:
    """Returns batches of `count` rows, longest rows first."""
    ordered = sorted(rows, key=lambda row: (-row.length, row.row))
    return [ordered[start : start + count] for start in range(0, len(ordered), count)]
