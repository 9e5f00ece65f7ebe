"""Calls of one sequence, compiled by torch: a few large pieces of work for many small operations.

A call of a small model on a CPU is hundreds of operations, and starting them takes a good part of
its time. Compiled, what lies between two products becomes one piece, and weights are constants.
All of a call is compiled as one: what tokens are told, the layers, and the scores of its rows.
Two kinds of a decoder's calls are compiled, where it makes them often: of one row, which is plain
decoding and drafting token by token, and of a few, which is what drafts a block and verifies a
draft; encoders have those of one text. All are compiled for any length of history and source,
before anything is timed. Longer calls and those of several sequences run as they are: compiled,
they were slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.config.commands import Compile
from drafttrain.decoding.engine.attention import FEW_ROWS
from drafttrain.decoding.engine.compiling import (
    CompiledCalls,
    StackModule,
    prepare,
    time_share,
)
from drafttrain.decoding.engine.pool import Line, Pool
from drafttrain.decoding.engine.stack import (
    Memory,
    Rotations,
    Rows,
    Stack,
    ToldStates,
    run_stack,
)
from drafttrain.decoding.inference import without_gradients

Kind = Literal["calls of one row", "calls of few rows"]

ROWS: dict[Kind, int] = {"calls of one row": 1, "calls of few rows": 6}
"""Rows of the call that each kind is compiled and timed with."""
HISTORY, SOURCE = 41, 17
"""Tokens before it, and of its source."""
LEAST_COLUMNS = 2
"""Columns of the cache that any call has before it."""


class CompiledEncoder:
    """`run_stack` for one text of an encoder: of few tokens, but more than one, which torch would
    compile apart."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._calls: CompiledCalls | None = None

    def __call__(self, ids: Tensor) -> Tensor | None:
        """None: such a text is not compiled. Shapes: [S] -> [S, D]."""
        if self._calls is None or not 1 < len(ids) <= FEW_ROWS:
            return None
        return self._calls((ids,))

    def prepare(self, how: Compile) -> str:
        """Compile; with `auto`, keep it where it pays. What came of it, in words."""
        stack = self._stack
        ids = torch.arange(SOURCE, device=stack.device)
        self._calls = CompiledCalls(_EncoderModule(stack), stack, "texts")

        @without_gradients
        def share() -> float:
            return time_share(lambda: self(ids), lambda: run_stack(stack, text_rows(ids), None))

        whole, told = prepare(how, stack, [(self._calls, (ids,), share)])
        self._calls = self._calls if whole else None
        return told


class CompiledStep:
    """`run_stack` for the only line of a pool, and its scores: one row, or a few."""

    def __init__(
        self,
        stack: Stack,
        rotations: Rotations | None,
        limit: int | None,
        embeds: bool,
        kinds: Collection[Kind] = ROWS.keys(),
    ) -> None:
        """limit: positions that there are. embeds: calls are given embedded tokens. kinds: those
        that are made often."""
        self._stack, self._rotations, self._embeds = stack, rotations, embeds
        self._positions = HISTORY + FEW_ROWS if limit is None else limit
        attention = stack.layers[0].attention
        self._most = FEW_ROWS * attention.kv_heads // attention.heads
        self._often = kinds
        self._kinds: dict[Kind, CompiledCalls] = {}

    def __call__(
        self,
        rows: Rows,
        pool: Pool,
        rotations: Rotations | None,
        embedded: Tensor | None,
        kept: dict[int, Tensor | None],
        scored: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Hidden states, as of `run_stack`, and the scores of the last rows, so many, [scored, V];
        None: such a call is not compiled."""
        kind = self._kind_of(rows, pool)
        if kind is None or kind not in self._kinds:
            return None
        found = self._kinds[kind](_given(rows, pool, rotations, embedded, scored))
        if found is None:
            return None
        written, hidden, logits, *of_layers = found
        pool.states[:, :, :, rows.columns] = written
        for number in kept:
            kept[number] = of_layers[number]
        return hidden, logits[0, logits.shape[1] - scored :]

    def _kind_of(self, rows: Rows, pool: Pool) -> Kind | None:
        """A source of one token is left out: torch compiles sizes of nought and one apart from
        others."""
        if pool.states.shape[1] != 1 or pool.lengths[0] == 1:
            return None
        new = rows.ids.shape[1]
        if new == 1:
            return "calls of one row"
        return "calls of few rows" if new <= self._most else None

    def prepare(self, how: Compile) -> str:
        """Compile all kinds; with `auto`, keep those that pay. What came of it, in words."""
        module = _DecoderModule(self._stack)
        self._kinds = {kind: CompiledCalls(module, self._stack, kind) for kind in self._often}
        whole, told = prepare(
            how,
            self._stack,
            [
                (
                    calls,
                    _given(*self._made_up(ROWS[kind]), ROWS[kind]),
                    partial(self.share, ROWS[kind]),
                )
                for kind, calls in self._kinds.items()
            ],
        )
        self._kinds = self._kinds if whole else {}
        return told

    @without_gradients
    def share(self, new: int, now: Callable[[], float] = perf_counter) -> float:
        """What compiled calls of so many rows take of the eager time, by this clock."""
        rows, pool, rotations, embedded = self._made_up(new)
        places = slice(HISTORY, HISTORY + new)

        def eagerly() -> None:
            cache = pool.columns(slice(0, 1), places.stop)
            memory = pool.memory(slice(0, 1), [0])
            hidden = run_stack(self._stack, rows, cache, rotations, memory, embedded)
            self._stack.logits(hidden)

        return time_share(lambda: self(rows, pool, rotations, embedded, {}, new), eagerly, now)

    @without_gradients
    def _made_up(self, new: int) -> tuple[Rows, Pool, Rotations | None, Tensor | None]:
        """A call of one sequence."""
        stack, (heads, width), total = self._stack, self._stack.heads, HISTORY + new
        pool = Pool(stack)
        line = Line(pool)  # nothing else is asked of the pool: it need not be held
        pool.states.normal_()
        if stack.layers[0].cross is not None:
            read = pool.states.new_zeros(len(pool.states), heads, SOURCE, width)
            pool.remember_source(line.number, read.normal_())
        places = torch.arange(total, device=stack.device)
        positions = places[None, HISTORY:].clamp(max=self._positions - 1)
        mask = None if new == 1 else (places <= places[HISTORY:, None])[None, None]
        keys = None if pool.positions is None else places[None]
        ids = torch.zeros_like(positions)
        told = None
        if stack.told is not None:
            states = torch.zeros(1, new, stack.told.width, dtype=stack.dtype, device=stack.device)
            there = torch.ones(1, new, 1, dtype=torch.bool, device=stack.device)
            told = ToldStates(states, there)
        rows = Rows(ids, positions, slice(HISTORY, total), mask, keys, told)
        embedded = stack.embed(ids, positions) if self._embeds else None
        return rows, pool, self._rotations, embedded


def _given(
    rows: Rows, pool: Pool, rotations: Rotations | None, embedded: Tensor | None, scored: int
) -> tuple[Any, ...]:
    """What `_DecoderModule` is called with: tensors laid out alike, whatever the call.

    At the very start columns that nobody sees stand in front, and of several rows two are scored at
    least, as torch compiles sizes of nought and one apart from others.
    """
    assert isinstance(rows.columns, slice)
    start, mask = rows.columns.start, None if rows.mask is None else rows.mask[0, 0]
    if mask is None:  # a single token sees all
        mask = torch.ones(1, rows.columns.stop, dtype=torch.bool, device=rows.ids.device)
    keys = None if rows.key_positions is None else rows.key_positions[0]
    unseen = max(0, LEAST_COLUMNS - start)
    if unseen:
        mask = torch.cat((mask[:, :start], mask.new_zeros(len(mask), unseen), mask[:, start:]), 1)
        if keys is not None:
            keys = torch.cat((keys[:start], keys.new_zeros(unseen), keys[start:]))
    length = pool.lengths[0] if len(pool.sources) else None
    rotary = None if rotations is None else (rotations.cos, rotations.sin)
    told = None if rows.told is None else (rows.told.states, rows.told.there)
    new = rows.ids.shape[1]
    last = torch.arange(new - max(scored, min(new, 2)), new, device=rows.ids.device)
    layout = (rows.ids[0], rows.positions[0], mask.contiguous(), keys, told, last)
    return (*layout, pool.states, pool.sources, length, rotary, embedded)


def text_rows(ids: Tensor) -> Rows:
    """One text as an encoder reads it. Shapes: [S]."""
    places = torch.arange(ids.shape[0], device=ids.device)
    return Rows(ids[None], places[None], None, None, places[None])


class _EncoderModule(StackModule):
    """An encoder, called with tensors alone."""

    def forward(self, which: str, ids: Tensor) -> Tensor:
        """Shapes: [S] -> [S, D]."""
        assert which  # torch looks at what is used
        return run_stack(self.rebuild(), text_rows(ids), None)[0]


class _DecoderModule(StackModule):
    """A decoder, called with tensors alone."""

    def forward(
        self,
        which: str,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        key_positions: Tensor | None,
        told: tuple[Tensor, Tensor] | None,
        scored: Tensor,
        states: Tensor,
        sources: Tensor,
        length: int | None,
        rotary: tuple[Tensor, Tensor] | None,
        embedded: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """New columns of the cache [2 L, 1, heads, N, head_dim], hidden states, the scores of
        these rows, and the outputs of all layers.

        which: of what is compiled, a name of its own, by which it is found again.
        """
        assert which  # torch looks at what is used
        new, total = mask.shape
        # a copy of its own: what is written into a tensor that is handed in costs one of all of it
        grown = [F.pad(one, (0, 0, 0, new)) for one in states[:, :, :, : total - new].unbind()]
        cache = list(zip(grown[::2], grown[1::2], strict=True))
        memory = None
        if length is not None:
            read = sources[:, :, :, :length].unbind()
            memory = Memory(list(zip(read[::2], read[1::2], strict=True)), None)
        columns = slice(total - new, total)
        keys = None if key_positions is None else key_positions[None]
        said = None if told is None else ToldStates(*told)
        rows = Rows(ids[None], positions[None], columns, mask[None, None], keys, said)
        stack = self.rebuild()
        kept: dict[int, Tensor | None] = dict.fromkeys(range(len(stack.layers)))
        rotations = None if rotary is None else Rotations(*rotary)
        hidden = run_stack(stack, rows, cache, rotations, memory, embedded, kept)
        written = torch.stack([one[:, :, total - new :] for one in grown])
        return (written, hidden, stack.logits(hidden[:, scored]), *kept.values())
