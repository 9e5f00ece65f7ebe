"""Batches of rows, and what decodes them: the shape that every backend of distillation has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from drafttrain.data.inputs.chats import Refused
from drafttrain.data.shards.outputs import ShardRow

Decoded = list[int] | Refused | None
"""The tokens of a row, EOS included, no padding; None: its scores were not finite."""


@dataclass(frozen=True)
class BatchDecoder:
    """A target that answers batches of rows, by one of the backends."""

    backend: str
    """Its name in the table of backends."""
    decode: Callable[[Sequence[ShardRow]], Sequence[Decoded]]
    """The output of each row. Raises OutOfMemoryError for a batch that is too large."""
    batches: Callable[[Sequence[ShardRow]], Iterable[list[ShardRow]]]
    """Parts the rows of a shard into batches. Which rows are together changes no row."""
    served_model: str | None = None
    """The name that a server has for the target."""


def batches_by_length(
    rows: Sequence[ShardRow], batch_tokens: int, equal: bool = False
) -> Iterator[list[ShardRow]]:
    """Longest first, as many rows as fit: rows x longest row <= batch_tokens, but at least one.

    equal: rows of one length only, so that none is padded.
    """
    ordered = sorted(rows, key=lambda row: (-row.length, row.row))
    while ordered:
        longest = ordered[0].length
        fit = max(1, batch_tokens // longest)
        if equal:
            fit = min(fit, sum(row.length == longest for row in ordered[:fit]))
        yield ordered[:fit]
        ordered = ordered[fit:]


def batches_of_rows(rows: Sequence[ShardRow], count: int) -> list[list[ShardRow]]:
    """Longest first, `count` rows each."""
    ordered = sorted(rows, key=lambda row: (-row.length, row.row))
    return [ordered[start : start + count] for start in range(0, len(ordered), count)]
