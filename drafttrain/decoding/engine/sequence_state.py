"""What a model has cached for one sequence: the only code that forgets and gathers columns.

The tokens whose keys and values are cached and, for encoder-decoder models, the encoder output and
the cross-attention's keys and values (computed once, never touched). `Cache.crop` is never used:
its meaning changed between releases of Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput


class SequenceState:
    """What a model has computed for one sequence."""

    def __init__(self, encoder_outputs: BaseModelOutput | None = None) -> None:
        self.encoder_outputs = encoder_outputs  # its first entry: [1, S, D]
        # without a configuration: with one, sliding-window layers would drop states
        self._own = DynamicCache()
        """Self-attention's part of the cache, a column a token."""
        self.cache: DynamicCache | EncoderDecoderCache = self._own
        if encoder_outputs is not None:
            self.cache = EncoderDecoderCache(self._own, DynamicCache())
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
        for layer in self._own.layers:
            layer.keys = layer.keys[:, :, :columns_kept]
            layer.values = layer.values[:, :, :columns_kept]

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
            index = torch.tensor(tail)
            for layer in self._own.layers:
                index = index.to(layer.keys.device)
                for states in (layer.keys, layer.values):
                    states[:, :, moved:kept] = states.index_select(2, index)
        self.forget(kept)
        self.chain = kept

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
