"""What a model has cached for one sequence: the only code that forgets and gathers columns."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.engine.cache import CacheRow
from drafttrain.decoding.types import Source

INTEGER = "q"
"""Type code of a token among the arrays of `array`: 64 bits, as in tensors of tokens."""


class SequenceState:
    """What a model has computed for one sequence: which token lies in which column.

    A round costs the same whatever is cached: over its whole length numbers are compared alone.
    """

    def __init__(self, columns: CacheRow, source: Source, encoded: Tensor | None = None) -> None:
        self.columns = columns
        self.source = source
        self.encoded = encoded
        """[S, D] the encoder's output, where there is one."""
        self.chain = 0
        """So many of the first columns are a chain; those after them are branches."""
        self.committed = 0
        """Columns in front of the draft that was scored last."""
        self._tokens = array(INTEGER)
        self._positions = array(INTEGER)

    @property
    def cached(self) -> int:
        """Columns of the cache."""
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """Tokens that are cached, a column each."""
        return self._tokens.tolist()

    @property
    def positions(self) -> list[int]:
        """Position of each cached token: those of a chain count from 0."""
        return self._positions.tolist()

    def keys_values(self, layers: Sequence[int], first: int, last: int) -> Tensor:
        """Keys and values of each layer in turn in columns first..last-1, which are of a chain:
        [2 L, heads, last - first, head_dim]."""
        found = [torch.stack(self.columns.keys_values(layer, last)) for layer in layers]
        return torch.cat(found)[:, :, first:]

    def positions_of(self, columns: Sequence[int]) -> list[int]:
        """Positions of some of them."""
        return [self._positions[column] for column in columns]

    def append(self, tokens: Sequence[int], positions: Sequence[int], is_chain: bool) -> None:
        """Note what has been fed: the rest of a chain, or branches."""
        self._tokens.extend(tokens)
        self._positions.extend(positions)
        if is_chain:
            self.chain = self.cached

    def name(self, first: int, tokens: Sequence[int]) -> None:
        """Note the tokens of columns from `first` on, once the host knows them."""
        self._tokens[first : first + len(tokens)] = array(INTEGER, tokens)

    def forget(self, columns_kept: int) -> None:
        """Drop all columns but the first ones. Raises ValueError if there are fewer."""
        if not 0 <= columns_kept <= self.cached:
            raise ValueError(f"{columns_kept} columns cannot be kept; {self.cached} are cached")
        self.chain = min(self.chain, columns_kept)
        del self._tokens[columns_kept:], self._positions[columns_kept:]

    def gather(self, first: int, columns: Sequence[int]) -> None:
        """Keep the first columns and, behind them, these in this order: all together a chain.

        Only those that change their place are copied.
        """
        kept = first + len(columns)
        places = zip(itertools.count(first), columns, strict=False)
        start = next((place for place, column in places if place != column), kept)
        if start < kept:
            tail = columns[start - first :]
            for held in (self._tokens, self._positions):
                held[start:kept] = array(INTEGER, [held[column] for column in tail])
            self.columns.move(start, tail)
        self.forget(kept)
        self.chain = kept

    def settle(self, columns: int) -> None:
        """The first columns are a chain; those behind it, drafts that were tried, are dropped."""
        self.chain = columns
        self.forget(columns)

    def align(self, tokens: Tensor) -> list[int]:
        """Forget what differs from these tokens; those that are missing, at least the last one.

        Shapes: tokens [T]. Raises ValueError while branches are cached.
        """
        if self.chain < self.cached:
            raise ValueError(
                f"{self.cached - self.chain} columns of branches are cached; forget them first "
                f"(columns_kept = {self.chain} or fewer)"
            )
        common = min(self.cached, len(tokens) - 1)
        same = tokens[:common].cpu().numpy() == np.array(self._tokens[:common])
        if not same.all():
            common = int(same.argmin())
        self.forget(common)
        return tokens[common:].tolist()
