"""KV cache of all sequences of a model, as layers of a Transformers cache.

A sequence has one batch row; its `SequenceState` tracks which token is in which column. Each call
specifies the columns that new tokens are written to, masks unused columns, and overwrites those of
dropped tokens. So dropping tokens costs nothing, and keeping a path of a tree is a gather.
"""

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


@dataclass
class Placement:
    """The rows and columns that a call writes to and reads, shared by all layers of a cache."""

    rows: Tensor | slice | None = None
    """Batch rows [B]; a slice if they are consecutive."""
    columns: Tensor | slice | None = None
    """Columns of the new tokens [B, N]; a slice if `rows` is one and all rows have the same."""
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
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values of the new tokens; returns those of all columns that are read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.dtype != key_states.dtype:  # the model was converted
            self.keys, self.values = self.keys.to(key_states), self.values.to(value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, held: Tensor, new: Tensor) -> Tensor:
        rows, columns = self.placement.rows, self.placement.columns
        if isinstance(rows, Tensor):
            rows = rows.to(held.device)
            held[rows[:, None], :, columns.to(held.device)] = new.transpose(1, 2)
            return held[rows, :, : self.placement.used]
        batch = held[rows]  # a view: writing to it fills the cache
        if isinstance(columns, slice):
            batch[:, :, columns] = new
        else:
            batch.scatter_(2, columns[:, None, :, None].to(batch.device).expand_as(new), new)
        return batch[:, :, : self.placement.used]

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
        self.cross_attention: list[Tensor] = []
        """Keys and values of each layer in turn, [rows, heads, S, head_dim]."""
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

    @property
    def source_capacity(self) -> int:
        """Allocated source length."""
        return self.cross_attention[0].shape[2] if self.cross_attention else 0

    def open(self, owner: object) -> int:
        """Returns the first free row, so that rows in use stay consecutive.

        The row is free again when `owner` is garbage-collected.
        """
        rows, columns = self.placement.capacity
        if not self._free:
            self._free += range(rows, max(1, 2 * rows))
            self._resize(max(1, 2 * rows), columns)
        row = heapq.heappop(self._free)
        weakref.finalize(owner, heapq.heappush, self._free, row)
        for held in cached_tensors(self.self_attention):
            held[row].nan_to_num_(0.0, 0.0, 0.0)  # a mask does not hide NaN of an earlier sequence
        return row

    def reserve_columns(self, columns: int) -> None:
        """Allocates at least this many columns in every row."""
        rows, capacity = self.placement.capacity
        if columns > capacity:
            self._resize(rows, max(columns, 2 * capacity))

    def reserve_sources(self, length: int) -> None:
        """Allocates at least this source length."""
        if length > self.source_capacity:
            rows = self.placement.capacity[0]
            self.cross_attention = _enlarged(self.cross_attention, rows, length)

    def _resize(self, rows: int, columns: int) -> None:
        self.placement.capacity = (rows, columns)
        for layer in self.self_attention.layers:
            if layer.is_initialized:
                layer.keys, layer.values = _enlarged([layer.keys, layer.values], rows, columns)
        self.cross_attention = _enlarged(self.cross_attention, rows, self.source_capacity)

    def release(self) -> None:
        """Frees the memory if no row is in use; later calls allocate it again."""
        if self.in_use == 0:
            self.self_attention.layers.clear()
            self.cross_attention.clear()
            self._free.clear()
            self.placement.capacity = (0, COLUMNS)

    def move(self, row: int, first: int, columns: Sequence[int]) -> None:
        """Copies these columns of a row to consecutive ones from `first` on."""
        index = torch.tensor(columns)
        for held in cached_tensors(self.self_attention):
            index = index.to(held.device)
            held[row, :, first : first + len(columns)] = held[row].index_select(1, index)

    def write(self, row: int, first: int, keys_values: Tensor) -> None:
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
            layer.keys[row, :, first:last] = keys
            layer.values[row, :, first:last] = values

    def write_source(self, row: int, keys_values: Sequence[Tensor]) -> None:
        """Caches the cross-attention of a row: keys and values of each layer in turn,
        [heads, S, head_dim]."""
        rows, length = self.placement.capacity[0], keys_values[0].shape[1]
        if not self.cross_attention:
            self.cross_attention = [
                states.new_zeros(rows, len(states), 0, states.shape[2]) for states in keys_values
            ]
        self.reserve_sources(length)
        if self.cross_attention[0].dtype != keys_values[0].dtype:  # the model was converted
            self.cross_attention = [held.to(keys_values[0]) for held in self.cross_attention]
        for held, states in zip(self.cross_attention, keys_values, strict=True):
            held[row, :, :length] = states
            held[row, :, length:] = 0.0  # may hold NaN of an earlier sequence

    def sources(self, rows: Tensor | slice, length: int) -> list[Tensor]:
        """Returns the cross-attention of rows: keys and values of each layer in turn,
        [B, heads, length, head_dim]."""
        return [
            held[rows if isinstance(rows, slice) else rows.to(held.device), :, :length]
            for held in self.cross_attention
        ]


def cached_tensors(cache: Cache) -> list[Tensor]:
    """Returns keys and values of each layer in turn."""
    layers = [layer for layer in cache.layers if layer.is_initialized]
    return [held for layer in layers for held in (layer.keys, layer.values)]


def _enlarged(tensors: Sequence[Tensor], rows: int, columns: int) -> list[Tensor]:
    """Pads tensors [rows, heads, columns, head_dim] with zeros."""
    return [
        F.pad(held, (0, 0, 0, columns - held.shape[2], 0, 0, 0, rows - len(held)))
        for held in tensors
    ]


CACHES: weakref.WeakSet[ColumnCache] = weakref.WeakSet()
"""All caches of this process."""


@torch.inference_mode()
def release_caches() -> None:
    """Frees the memory of all caches that no sequence uses."""
    for cache in list(CACHES):
        cache.release()
