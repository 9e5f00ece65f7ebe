"""KV cache of all sequences of a model, as layers of a Transformers cache.

A sequence has one batch row; its `SequenceState` tracks which token is in which column. Each call
specifies the columns that the new tokens of each row are written to. Every call masks unused
columns, and later calls overwrite them. So dropping tokens costs nothing, and keeping a path of a
tree is a gather.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

COLUMNS = 128
"""Initial number of columns; it at least doubles when more are needed."""

KeysValues = tuple[Tensor, Tensor]


@dataclass
class Placement:
    """The rows and columns that a call writes to and reads, shared by all layers of a cache."""

    rows: Tensor | slice | None = None
    """Batch rows [B]; a slice if they are consecutive."""
    columns: Tensor | slice | None = None
    """Columns of the new tokens [B, N]; a slice if they are the same for all rows."""
    used: int = 0
    """Number of columns that the call reads, from the first one on."""
    cached: int = 0
    """Tokens cached before the call if the model computes positions itself (one chain); else 0."""
    capacity: tuple[int, int] = (0, COLUMNS)
    """Allocated rows and columns of every layer."""


class ColumnLayer(CacheLayerMixin):
    """Cache of one decoder layer: keys and values [rows, heads, columns, head_dim]."""

    is_sliding = False

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, columns = self.placement.capacity
        self.keys, self.values = (
            states.new_zeros(rows, states.shape[1], columns, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **named: Any
    ) -> KeysValues:
        """Writes keys and values of the new tokens; returns those of all columns that are read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.dtype != key_states.dtype:  # the model was converted
            self.keys, self.values = self.keys.to(key_states), self.values.to(value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, held: Tensor, new: Tensor) -> Tensor:
        rows, columns = self.placement.rows, self.placement.columns
        if isinstance(rows, slice) and isinstance(columns, slice):
            batch = held[rows]  # a view: writing to it fills the cache
            batch[:, :, columns] = new
        elif isinstance(rows, slice):
            batch = held[rows]
            batch.scatter_(2, columns[:, None, :, None].to(batch.device).expand_as(new), new)
        else:
            rows = rows.to(held.device)
            if isinstance(columns, slice):
                columns = torch.arange(columns.start, columns.stop)[None]
            held[rows[:, None], :, columns.to(held.device)] = new.transpose(1, 2)
            batch = held[rows]
        return batch[:, :, : self.placement.used]

    def grow(self) -> None:
        """Enlarges the tensors to `placement.capacity`, keeping their content."""
        if self.is_initialized:
            rows, columns = self.placement.capacity
            padding = (0, 0, 0, columns - self.keys.shape[2], 0, 0, 0, rows - self.keys.shape[0])
            self.keys, self.values = F.pad(self.keys, padding), F.pad(self.values, padding)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.placement.used, 0

    def get_seq_length(self) -> int:
        return self.placement.cached

    def get_max_length(self) -> int:
        return self.placement.capacity[1]

    get_max_cache_shape = get_max_length  # the name before Transformers 5.20


class ColumnCache:
    """Self-attention and cross-attention caches of all sequences of one model."""

    def __init__(self) -> None:
        self.placement = Placement()
        self.self_attention = Cache(layer_class_to_replicate=partial(ColumnLayer, self.placement))
        self.cross_attention: list[list[Tensor]] = []
        """[keys, values] of each layer, [rows, heads, S, head_dim]."""
        self.source_lengths: dict[int, int] = {}
        """Length of the source of each row whose cross-attention is cached."""
        self._free: list[int] = []
        CACHES.add(self)

    @property
    def in_use(self) -> int:
        """Number of rows that sequences use."""
        return self.placement.capacity[0] - len(self._free)

    @property
    def is_ready(self) -> bool:
        """Whether all layers are allocated, which the first call does."""
        layers = self.self_attention.layers
        return bool(layers) and all(layer.is_initialized for layer in layers)

    def open(self) -> CacheRow:
        """Returns the first free row, so that rows in use stay consecutive."""
        rows, columns = self.placement.capacity
        if not self._free:
            self._free += range(rows, max(1, 2 * rows))
            self._resize(max(1, 2 * rows), columns)
        number = heapq.heappop(self._free)
        self.source_lengths.pop(number, None)
        for layer in self.self_attention.layers:  # a mask does not hide NaN of an earlier sequence
            if layer.is_initialized:
                layer.keys[number].nan_to_num_(0.0, 0.0, 0.0)
                layer.values[number].nan_to_num_(0.0, 0.0, 0.0)
        row = CacheRow(self, number)
        weakref.finalize(row, heapq.heappush, self._free, number)
        return row

    def reserve_columns(self, columns: int) -> None:
        """Allocates at least this many columns in every row."""
        rows, capacity = self.placement.capacity
        if columns > capacity:
            self._resize(rows, max(columns, 2 * capacity))

    def _resize(self, rows: int, columns: int) -> None:
        self.placement.capacity = (rows, columns)
        for layer in self.self_attention.layers:
            layer.grow()
        for layer in self.cross_attention:
            layer[:] = [F.pad(held, (0,) * 7 + (rows - len(held),)) for held in layer]

    def release(self) -> None:
        """Frees the memory if no row is in use; later calls allocate it again."""
        if self.in_use == 0:
            self.self_attention.layers.clear()
            self.cross_attention.clear()
            self._free.clear()
            self.placement.capacity = (0, COLUMNS)

    def write(self, number: int, first: int, keys_values: Tensor) -> None:
        """Writes P columns of a row, from column `first` on.

        Shapes: keys and values of every layer in turn, [2 L, heads, P, head_dim].
        """
        last = first + keys_values.shape[2]
        self.reserve_columns(last)
        for index, (keys, values) in enumerate(keys_values.unflatten(0, (-1, 2))):
            if index == len(self.self_attention.layers):
                self.self_attention.layers.append(ColumnLayer(self.placement))
            layer = self.self_attention.layers[index]
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            layer.keys[number, :, first:last] = keys
            layer.values[number, :, first:last] = values

    def remember_source(self, number: int, keys_values: Sequence[KeysValues]) -> None:
        """Caches the cross-attention of a row: keys and values [heads, S, head_dim] per layer."""
        rows, length = self.placement.capacity[0], keys_values[0][0].shape[1]
        self.source_lengths[number] = length
        if not self.cross_attention:
            self.cross_attention = [
                [states.new_zeros(rows, len(states), 0, states.shape[2]) for states in pair]
                for pair in keys_values
            ]
        self.reserve_sources(length)
        if self.cross_attention[0][0].dtype != keys_values[0][0].dtype:  # the model was converted
            self.cross_attention = [
                [held.to(keys_values[0][0]) for held in layer] for layer in self.cross_attention
            ]
        for layer, pair in zip(self.cross_attention, keys_values, strict=True):
            for held, states in zip(layer, pair, strict=True):
                held[number, :, :length] = states
                held[number, :, length:] = 0.0  # may hold NaN of an earlier sequence

    @property
    def source_capacity(self) -> int:
        """Allocated source length."""
        return self.cross_attention[0][0].shape[2] if self.cross_attention else 0

    def reserve_sources(self, length: int) -> None:
        """Allocates at least this source length."""
        missing = length - self.source_capacity
        if missing > 0:
            for layer in self.cross_attention:
                layer[:] = [F.pad(held, (0, 0, 0, missing)) for held in layer]

    def sources(self, rows: Tensor | slice, length: int) -> list[KeysValues]:
        """Returns each layer's cross-attention of rows: two [B, heads, length, head_dim]."""
        return [
            tuple(
                held[rows if isinstance(rows, slice) else rows.to(held.device), :, :length]
                for held in layer
            )
            for layer in self.cross_attention
        ]


class CacheRow:
    """The row of one sequence; it is free again when this object is garbage-collected."""

    def __init__(self, cache: ColumnCache, number: int) -> None:
        self.cache, self.number = cache, number

    def move(self, first: int, columns: Sequence[int]) -> None:
        """Copies these columns to consecutive ones from `first` on."""
        last = first + len(columns)
        for layer in self.cache.self_attention.layers:
            index = torch.tensor(columns, device=layer.keys.device)
            for states in (layer.keys[self.number], layer.values[self.number]):
                states[:, first:last] = states.index_select(1, index)

    def keys_values(self, layer: int, columns: int) -> KeysValues:
        """Returns keys and values [heads, columns, head_dim] of a layer's first columns."""
        held = self.cache.self_attention.layers[layer]
        return held.keys[self.number, :, :columns], held.values[self.number, :, :columns]


CACHES: weakref.WeakSet[ColumnCache] = weakref.WeakSet()
"""All caches of this process."""


@torch.inference_mode()
def release_caches() -> None:
    """Frees the memory of all caches that no sequence uses."""
    for cache in list(CACHES):
        cache.release()
