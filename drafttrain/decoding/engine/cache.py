"""Keys and values of all sequences of a model, in tensors that Transformers' layers write to.

A sequence has a row. Its columns are counted by its `SequenceState`: a call says into which columns
each row's new tokens go. What lies in columns that no sequence uses is masked by every call and
overwritten later, so that dropping tokens costs nothing and keeping a path of a tree is a gather.
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
"""Columns that there is room for at first; their number doubles where they do not suffice."""

KeysValues = tuple[Tensor, Tensor]


@dataclass
class Placement:
    """Where the new tokens of a call go, for all layers of a cache."""

    rows: Tensor | slice | None = None
    """Batch rows [B]; a slice where they are consecutive."""
    columns: Tensor | slice | None = None
    """Columns of the new tokens [B, N]; a slice where all rows have the same."""
    used: int = 0
    """Columns that the call reads, from the first one on."""
    cached: int = 0
    """Tokens in front of the call's, where the model counts positions itself (one row, a chain)."""
    capacity: tuple[int, int] = (0, COLUMNS)
    """Rows and columns of every layer's tensors."""


class ColumnLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, [rows, heads, columns, head_dim]."""

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
        """Write the new tokens' keys and values; returns those of all columns in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.dtype != key_states.dtype:  # the model was converted
            self.keys, self.values = self.keys.to(key_states), self.values.to(value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, held: Tensor, new: Tensor) -> Tensor:
        place = self.placement
        rows, columns = place.rows, place.columns
        if isinstance(rows, slice) and isinstance(columns, slice):
            own = held[rows]
            own[:, :, columns] = new
        elif isinstance(rows, slice):
            own = held[rows]
            own.scatter_(2, columns[:, None, :, None].to(own.device).expand_as(new), new)
        else:
            rows = rows.to(held.device)
            if isinstance(columns, slice):
                columns = torch.arange(columns.start, columns.stop)[None]
            held[rows[:, None], :, columns.to(held.device)] = new.transpose(1, 2)
            own = held[rows]
        return own[:, :, : place.used]

    def grow(self) -> None:
        """Have the room that `placement` names; what is cached stays."""
        if self.is_initialized:
            rows, columns = self.placement.capacity
            more = (0, 0, 0, columns - self.keys.shape[2], 0, 0, 0, rows - self.keys.shape[0])
            self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.placement.used, 0

    def get_seq_length(self) -> int:
        return self.placement.cached

    def get_max_length(self) -> int:
        return self.placement.capacity[1]

    get_max_cache_shape = get_max_length  # its name before Transformers 5.20


class ColumnCache:
    """The rows of one model: self-attention's columns, and what cross-attention reads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.placement = Placement()
        self.own = Cache(layer_class_to_replicate=partial(ColumnLayer, self.placement))
        self.cross: list[list[Tensor]] = []
        """Keys and values of each layer's cross-attention, [rows, heads, S, head_dim]."""
        self.source_lengths: dict[int, int] = {}
        """States of each row's source, where they are known."""
        self._free: list[int] = []
        CACHES.add(self)

    @property
    def in_use(self) -> int:
        """Rows that somebody holds."""
        return self.placement.capacity[0] - len(self._free)

    @property
    def is_ready(self) -> bool:
        """Whether every layer has its tensors: they are made by the first call."""
        return bool(self.own.layers) and all(one.is_initialized for one in self.own.layers)

    def open(self) -> CacheRow:
        """A free row: the first one there is, so that those in use are consecutive."""
        rows, columns = self.placement.capacity
        if not self._free:
            self._free += range(rows, max(1, 2 * rows))
            self._resize(max(1, 2 * rows), columns)
        number = heapq.heappop(self._free)
        self.source_lengths.pop(number, None)
        for layer in self.own.layers:  # NaN left by another sequence would pass any mask
            if layer.is_initialized:
                layer.keys[number].nan_to_num_(0.0, 0.0, 0.0)
                layer.values[number].nan_to_num_(0.0, 0.0, 0.0)
        row = CacheRow(self, number)
        weakref.finalize(row, heapq.heappush, self._free, number)
        return row

    def reserve_columns(self, columns: int) -> None:
        """Have so many columns in every row, or more."""
        rows, capacity = self.placement.capacity
        if columns > capacity:
            self._resize(rows, max(columns, 2 * capacity))

    def _resize(self, rows: int, columns: int) -> None:
        self.placement.capacity = (rows, columns)
        for layer in self.own.layers:
            layer.grow()
        for layer in self.cross:
            layer[:] = [F.pad(own, (0,) * 7 + (rows - len(own),)) for own in layer]

    def release(self) -> None:
        """Give the memory back where no row is in use; it grows again as it is needed."""
        if self.in_use == 0:
            self.own.layers.clear()
            self.cross.clear()
            self._free.clear()
            self.placement.capacity = (0, COLUMNS)

    def write(self, number: int, first: int, keys_values: Tensor) -> None:
        """Put these into a row's columns from `first` on: keys and values of every layer in turn
        [2 L, heads, P, head_dim]."""
        last = first + keys_values.shape[2]
        self.reserve_columns(last)
        for index, (keys, values) in enumerate(keys_values.unflatten(0, (-1, 2))):
            if index == len(self.own.layers):
                self.own.layers.append(ColumnLayer(self.placement))
            layer = self.own.layers[index]
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            layer.keys[number, :, first:last] = keys
            layer.values[number, :, first:last] = values

    def remember_source(self, number: int, keys_values: Sequence[KeysValues]) -> None:
        """Keep a row's keys and values of cross-attention, two [heads, S, head_dim] a layer."""
        rows, length = self.placement.capacity[0], keys_values[0][0].shape[1]
        self.source_lengths[number] = length
        if not self.cross:
            self.cross = [
                [own.new_zeros(rows, len(own), 0, own.shape[2]) for own in both]
                for both in keys_values
            ]
        self.reserve_sources(length)
        if self.cross[0][0].dtype != keys_values[0][0].dtype:  # the model was converted
            self.cross = [[held.to(keys_values[0][0]) for held in layer] for layer in self.cross]
        for layer, both in zip(self.cross, keys_values, strict=True):
            for held, own in zip(layer, both, strict=True):
                held[number, :, :length] = own
                held[number, :, length:] = 0.0  # what another left there may be no number

    @property
    def source_capacity(self) -> int:
        """States that there is room for in each source."""
        return self.cross[0][0].shape[2] if self.cross else 0

    def reserve_sources(self, length: int) -> None:
        """Have room for sources of so many states, or more."""
        missing = length - self.source_capacity
        if missing > 0:
            for layer in self.cross:
                layer[:] = [F.pad(held, (0, 0, 0, missing)) for held in layer]

    def sources(self, rows: Tensor | slice, length: int) -> list[KeysValues]:
        """What cross-attention reads in these rows, two [B, heads, length, head_dim] a layer."""
        return [
            tuple(
                held[rows if isinstance(rows, slice) else rows.to(held.device), :, :length]
                for held in layer
            )
            for layer in self.cross
        ]


class CacheRow:
    """A sequence's row; it is given back when nobody holds it any more."""

    def __init__(self, cache: ColumnCache, number: int) -> None:
        self.cache, self.number = cache, number

    @property
    def knows_source(self) -> bool:
        """Whether cross-attention's keys and values are cached."""
        return self.number in self.cache.source_lengths

    def move(self, first: int, columns: Sequence[int]) -> None:
        """Copy these columns to those from `first` on."""
        last = first + len(columns)
        for layer in self.cache.own.layers:
            index = torch.tensor(columns, device=layer.keys.device)
            for states in (layer.keys[self.number], layer.values[self.number]):
                states[:, first:last] = states.index_select(1, index)

    def keys_values(self, layer: int, columns: int) -> KeysValues:
        """Two [heads, columns, head_dim] of a decoder layer: its first columns."""
        found = self.cache.own.layers[layer]
        return found.keys[self.number, :, :columns], found.values[self.number, :, :columns]


CACHES: weakref.WeakSet[ColumnCache] = weakref.WeakSet()
"""All there are in this process."""


@torch.inference_mode()
def release_caches() -> None:
    """Give back the memory of all caches that no sequence uses."""
    for cache in list(CACHES):
        cache.release()
