"""What a model has cached for one sequence: the only code that forgets and gathers columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from drafttrain.decoding.types import Source


class Columns(Protocol):
    """Where a sequence's keys and values lie, a column a token."""

    def move(self, first: int, columns: Sequence[int]) -> None:
        """Copy these columns to those from `first` on."""
        ...

    def cut(self, columns: int) -> None:
        """Drop all but the first ones."""
        ...


class SequenceState:
    """What a model has computed for one sequence: which token lies in which column."""

    def __init__(self, columns: Columns, source: Source, encoded: Tensor | None = None) -> None:
        self.columns = columns
        self.source = source
        self.encoded = encoded
        """[S, D] the encoder's output, where there is one."""
        self.tokens: list[int] = []
        """Tokens that are cached, a column each."""
        self.positions: list[int] = []
        """Position of each cached token: those of a chain count from 0."""
        self.chain = 0
        """So many of the first columns are a chain; those after them are branches."""
        self.committed = 0
        """Columns in front of the draft that was scored last."""

    @property
    def cached(self) -> int:
        """Columns of the cache."""
        return len(self.tokens)

    def forget(self, columns_kept: int) -> None:
        """Drop all columns but the first ones. Raises ValueError if there are fewer."""
        if not 0 <= columns_kept <= self.cached:
            raise ValueError(f"{columns_kept} columns cannot be kept; {self.cached} are cached")
        self.chain = min(self.chain, columns_kept)
        if columns_kept == self.cached:
            return
        del self.tokens[columns_kept:], self.positions[columns_kept:]
        self.columns.cut(columns_kept)

    def gather(self, columns: Sequence[int]) -> None:
        """Keep these columns, in this order, which are a chain.

        Only those that change their place are copied.
        """
        kept = len(columns)
        moved = next((i for i, column in enumerate(columns) if i != column), kept)
        if moved < kept:
            tail = columns[moved:]
            self.tokens[moved:kept] = [self.tokens[column] for column in tail]
            self.positions[moved:kept] = [self.positions[column] for column in tail]
            self.columns.move(moved, tail)
        self.forget(kept)
        self.chain = kept

    def settle(self, columns: int) -> None:
        """The first columns are a chain; those behind it, drafts that were tried, are dropped."""
        self.chain = columns
        self.forget(columns)

    def align(self, tokens: list[int]) -> list[int]:
        """Forget what differs from these tokens; those that are missing, at least the last one.

        Raises ValueError while branches are cached.
        """
        if self.chain < self.cached:
            raise ValueError(
                f"{self.cached - self.chain} columns of branches are cached; forget them first "
                f"(columns_kept = {self.chain} or fewer)"
            )
        common = min(self.cached, len(tokens) - 1)
        if self.tokens[:common] != tokens[:common]:
            pairs = zip(self.tokens, tokens, strict=False)
            common = next(i for i, (old, new) in enumerate(pairs) if old != new)
        self.forget(common)
        return tokens[common:]
