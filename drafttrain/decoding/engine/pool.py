"""Keys and values of all sequences of one model, in tensors that are allocated once a capacity.

A sequence has a line of its own; its columns are counted by its `SequenceState`. What lies behind
them is left from earlier rounds: nobody sees it, and the next tokens are written over it. Lines in
use are always the first ones: where one is given back, the last one takes its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.decoding.engine.stack import KeysValues, Memory, Stack

COLUMNS = 128
"""Columns that a pool has room for at first; it doubles where they do not suffice."""


class Line:
    """A sequence's place in a pool; it is given back when nobody holds it any more."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.number = pool.take(self)

    def move(self, first: int, columns: Sequence[int]) -> None:
        """Copy these columns to those from `first` on."""
        pool, last = self.pool, first + len(columns)
        index = torch.tensor(columns, device=pool.states.device)
        line = pool.states[:, self.number]
        line[:, :, first:last] = line.index_select(2, index)
        if pool.positions is not None:
            own = pool.positions[self.number]
            own[first:last] = own.index_select(0, index)

    def cut(self, columns: int) -> None:
        """What lies behind so many columns is not seen any more; it is left where it is."""

    def keys_values(self, layer: int, columns: int) -> KeysValues:
        """Two [heads, columns, head_dim] of a decoder layer."""
        both = self.pool.states[2 * layer : 2 * layer + 2, self.number, :, :columns]
        return both[0], both[1]

    def cross_keys_values(self, layer: int) -> KeysValues:
        """Two [heads, S, head_dim] of a decoder layer."""
        pool = self.pool
        both = pool.sources[2 * layer : 2 * layer + 2, self.number]
        length = pool.lengths[self.number]
        return both[0, :, :length], both[1, :, :length]


class Pool:
    """Lines of one model's keys and values. Shapes: states [2 L, B, heads, C, head_dim], keys and
    values of every layer in turn; sources, of cross-attention, likewise with the sources' length.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.lengths: list[int] = []
        """Tokens of each line's source."""
        self._holders: list[weakref.ref[Line]] = []
        self._forgotten: list[weakref.ref[Line]] = []
        """Holders that are gone, at any moment, also in the middle of a call."""
        self._empty()
        POOLS.add(self)

    def _empty(self) -> None:
        """Hold no memory."""
        stack, (heads, width) = self._stack, self._stack.heads
        like: dict[str, Any] = {"dtype": stack.dtype, "device": stack.device}
        layers = 2 * len(stack.layers)
        self.states = torch.zeros(layers, 0, heads, COLUMNS, width, **like)
        crossing = stack.layers[0].cross is not None
        self.sources = torch.zeros(layers if crossing else 0, 0, heads, 0, width, **like)
        self.positions: Tensor | None = None
        """[B, C], where distances between tokens are wanted."""
        if stack.distance_bias is not None:
            self.positions = torch.zeros(0, COLUMNS, dtype=torch.long, device=stack.device)

    def release(self) -> None:
        """Give the memory back where no line is in use; it grows again as it is needed."""
        self.tidy()
        if not self._holders:
            self._empty()

    @property
    def in_use(self) -> int:
        """Lines that somebody holds."""
        return len(self._holders) - len(self._forgotten)

    def take(self, line: Line) -> int:
        """The number of a free line."""
        self.tidy()
        number = len(self._holders)
        if number == self.states.shape[1]:
            self._grow(lines=max(1, 2 * number))
        # a model that gave NaN must not be heard of by those who come later
        self.states[:, number].nan_to_num_(0.0, 0.0, 0.0)
        self._holders.append(weakref.ref(line, self._forgotten.append))
        self.lengths.append(0)
        return number

    def _give_back(self, number: int) -> None:
        """Free a line; the last one in use takes its place."""
        last = len(self._holders) - 1
        if number < last:
            mover = self._holders[last]()
            for tensor in (self.states, self.sources):
                if len(tensor):
                    tensor[:, number] = tensor[:, last]
            if self.positions is not None:
                self.positions[number] = self.positions[last]
            self.lengths[number] = self.lengths[last]
            self._holders[number] = self._holders[last]
            if mover is not None:
                mover.number = number
        self._holders.pop()
        self.lengths.pop()

    @torch.inference_mode()
    def tidy(self) -> None:
        """Free the lines that nobody holds any more. Between calls only: lines change places."""
        while self._forgotten:
            gone = self._forgotten.pop()
            self._give_back(next(n for n, holder in enumerate(self._holders) if holder is gone))

    def make_room(self, columns: int) -> None:
        """Have so many columns in every line, or more."""
        room = self.states.shape[3]
        if columns > room:
            self._grow(columns=max(columns, 2 * room))

    def write(self, number: int, first: int, keys_values: Tensor) -> None:
        """Put these into a line's columns from `first` on: [2 L, heads, P, head_dim]."""
        last = first + keys_values.shape[2]
        self.make_room(last)
        self.states[:, number, :, first:last] = keys_values

    def remember_source(self, number: int, keys_values: Tensor) -> None:
        """Keep cross-attention's keys and values of a line: [2 L, heads, S, head_dim].

        There is room for one more than any source has: compiled calls read a part of it always.
        """
        length, room = keys_values.shape[2], self.sources.shape[3]
        if length >= room or self.sources.shape[1] < self.states.shape[1]:
            wanted = max(length + 1, 2 * room) if length >= room else room
            self.sources = _enlarged(self.sources, self.states.shape[1], wanted)
        self.sources[:, number, :, :length] = keys_values
        self.lengths[number] = length

    def columns(self, lines: slice | Tensor, count: int) -> list[KeysValues]:
        """The first columns of some lines, of every layer; views where the lines are a slice."""
        found = self.states[:, lines, :, :count].unbind()
        return list(zip(found[::2], found[1::2], strict=True))

    def memory(self, lines: slice | Tensor, numbers: Sequence[int]) -> Memory | None:
        """What cross-attention reads of some lines."""
        if not len(self.sources):
            return None
        lengths = [self.lengths[number] for number in numbers]
        longest = max(lengths)
        found = self.sources[:, lines, :, :longest].unbind()
        mask = None
        if min(lengths) < longest:
            places = torch.arange(longest, device=self.sources.device)
            ends = torch.tensor(lengths, device=self.sources.device)
            mask = (places < ends[:, None])[:, None, None]
        return Memory(list(zip(found[::2], found[1::2], strict=True)), mask)

    def _grow(self, lines: int | None = None, columns: int | None = None) -> None:
        lines = lines or self.states.shape[1]
        columns = columns or self.states.shape[3]
        self.states = _enlarged(self.states, lines, columns)
        if len(self.sources):
            self.sources = _enlarged(self.sources, lines, self.sources.shape[3])
        if self.positions is not None:
            known = self.positions
            self.positions = known.new_zeros(lines, columns)
            self.positions[: known.shape[0], : known.shape[1]] = known


POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
"""All there are in this process."""


def release_caches() -> None:
    """Give back the memory of all pools that no sequence is in."""
    for pool in list(POOLS):
        pool.release()


def _enlarged(tensor: Tensor, lines: int, columns: int) -> Tensor:
    """The same numbers, with room for more. Shapes: [2 L, B, heads, C, head_dim]."""
    layers, had, heads, known, width = tensor.shape
    larger = tensor.new_zeros(layers, lines, heads, columns, width)
    larger[:, :had, :, :known] = tensor
    return larger
