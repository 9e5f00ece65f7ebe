"""Cached tokens of one sequence; the only code that drops and gathers cache columns."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.engine.cache import ColumnCache
from drafttrain.decoding.types import Source

INTEGER = "q"
"""Type code for `array`: 64-bit integers, as in token tensors."""


class SequenceState:
    """A model's state of one sequence: which token is in which column of its cache row.

    The row is free again when the state is garbage-collected. The cost of a round does not grow
    with the cached length, except for comparing token ids.
    """

    def __init__(
        self, kv_cache: ColumnCache, source: Source, encoded: Tensor | None = None
    ) -> None:
        self.kv_cache, self.row = kv_cache, kv_cache.open(self)
        self.source = source
        self.encoded = encoded
        """[S, D] encoder states; None: there is no encoder."""
        self.has_cross_attention = False
        """Whether the cross-attention to its source is cached."""
        self.chain = 0
        """Number of first columns that form a chain; those after them are tree nodes."""
        self.committed = 0
        """Number of columns before the draft that was scored last."""
        self._tokens = array(INTEGER)
        self._positions = array(INTEGER)

    @property
    def cached(self) -> int:
        """Number of cached columns."""
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The token of each cached column."""
        return self._tokens.tolist()

    @property
    def positions(self) -> list[int]:
        """The position of each cached token; a chain's positions count from 0."""
        return self._positions.tolist()

    def keys_values(self, layers: Sequence[int], first: int, last: int) -> Tensor:
        """Returns keys and values of each layer in turn, in the columns first..last-1 of a chain.

        Shapes: [2 L, heads, last - first, head_dim].
        """
        chosen = [self.kv_cache.self_attention.layers[number] for number in layers]
        keys_values = [held for layer in chosen for held in (layer.keys, layer.values)]
        return torch.stack([held[self.row, :, first:last] for held in keys_values])

    def positions_of(self, columns: Sequence[int]) -> list[int]:
        """Returns the positions of these columns."""
        return [self._positions[column] for column in columns]

    def append(self, tokens: Sequence[int], positions: Sequence[int], is_chain: bool) -> None:
        """Records new columns: the continuation of a chain, or tree nodes."""
        self._tokens.extend(tokens)
        self._positions.extend(positions)
        if is_chain:
            self.chain = self.cached

    def set_tokens(self, first: int, tokens: Sequence[int]) -> None:
        """Records the tokens of columns from `first` on when they arrive from the device."""
        self._tokens[first : first + len(tokens)] = array(INTEGER, tokens)

    def forget(self, columns_kept: int) -> None:
        """Drops all columns except the first ones."""
        assert 0 <= columns_kept <= self.cached, "fewer columns are cached"
        self.chain = min(self.chain, columns_kept)
        del self._tokens[columns_kept:], self._positions[columns_kept:]

    def gather(self, first: int, columns: Sequence[int]) -> None:
        """Keeps the first columns followed by `columns` in this order, together a chain.

        Only columns that move are copied.
        """
        kept = first + len(columns)
        start = next((new for new, old in enumerate(columns, first) if new != old), kept)
        if start < kept:
            moved = columns[start - first :]
            for held in (self._tokens, self._positions):
                held[start:kept] = array(INTEGER, [held[column] for column in moved])
            self.kv_cache.move(self.row, start, moved)
        self.settle(kept)

    def settle(self, columns: int) -> None:
        """Marks the first columns as a chain and drops those after it, unaccepted draft tokens."""
        self.chain = columns
        self.forget(columns)

    def align(self, tokens: Tensor) -> list[int]:
        """Drops cached tokens from the first difference on; returns the tokens still to cache.

        At least the last token is returned; no tree nodes may be cached. Shapes: tokens [T].
        """
        assert self.chain == self.cached, "tree nodes are cached"
        common = min(self.cached, len(tokens) - 1)
        same = tokens[:common].cpu().numpy() == np.array(self._tokens[:common])
        if not same.all():
            common = int(same.argmin())
        self.forget(common)
        return tokens[common:].tolist()
