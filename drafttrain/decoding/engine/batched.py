"""Families that are known: many sequences in one call of a `Stack`, over a shared `Pool`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from drafttrain.config.commands import Compile
from drafttrain.decoding.engine.architectures import position_limit
from drafttrain.decoding.engine.calls import Feed, StepOutput, record, told_by
from drafttrain.decoding.engine.compiled import ROWS, CompiledStep, Kind
from drafttrain.decoding.engine.compiling import enlist
from drafttrain.decoding.engine.encoding import Encode, encoder_of
from drafttrain.decoding.engine.families import read_stack
from drafttrain.decoding.engine.pool import Line, Pool
from drafttrain.decoding.engine.products import choose_ways, one_side
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.stack import Rotations, Rows, Stack, run_stack
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.types import Source
from drafttrain.models.spec_drafter.pooling import group_means

SMALL = 16
"""Calls of up to so many tokens a sequence are shared with any shorter ones."""
STATES_AT_ONCE = 2048
"""Encoder states that cross-attention projects in a call, if one source has not more: many texts,
one clip. What more take between the products leaves the caches."""
STRIP = 64
"""Most new tokens whose mask is cut from a strip that is kept."""


Embed = Callable[[Sequence[Feed], Tensor, Tensor], Tensor]
"""Embedded tokens of feeds, where their embedding is not all: ids, positions [B, N] -> [B, N, D]"""


class Batched:
    """How a decoder that is read as a `Stack` is called. It keeps the cache of all its sequences.

    limit: positions that it has, where it has so many only. cross_layers: layers of the target
    whose keys and values of cross-attention its own layers have, where sources bring them along.
    pooling: encoder states that cross-attention reads as one, their mean. prompt_layers: layers of
    the target whose keys and values of the prompt sources bring along; its own cache begins with
    them. embeds: feeds bring along what is fed (`Feed.embedded`). apart: no call feeds tokens and
    slots, which have weights of their own; each is then a stack that multiplies with its own alone.
    often: kinds of calls that are made often enough to be compiled.
    """

    takes_branches = True

    def __init__(
        self,
        stack: Stack,
        encode: Encode | None = None,
        limit: int | None = None,
        rotary: Callable[..., tuple[Tensor, Tensor]] | None = None,
        embed: Embed | None = None,
        cross_layers: Sequence[int] | None = None,
        pooling: int = 1,
        prompt_layers: Sequence[int] = (),
        embeds: bool = False,
        apart: bool = False,
        often: Collection[Kind] = ROWS.keys(),
    ) -> None:
        self.stack = stack
        self._sides: dict[bool, Stack] = {}
        """The stack of tokens and the one of slots, by whether it is that of slots; none where one
        is for all."""
        if apart and stack.slot_id is not None:
            tokens = replace(one_side(stack, False), slot_id=None)
            self._sides = {False: tokens, True: one_side(stack, True)}
        for part in self._sides.values() or (stack,):
            choose_ways(part)
        self._compiled_sides: dict[bool, CompiledStep] = {}
        self.device = stack.device
        self.pool: Pool | None = None
        self._encode, self._embed = encode, embed
        self._limit, self._rotary = limit, rotary
        self._cross_layers, self._pooling = cross_layers, pooling
        self._prompt_layers, self._embeds = prompt_layers, embeds
        self._often = often
        self._rotations: Rotations | None = None
        self._strip = torch.empty(STRIP, 0)
        self.compiled: CompiledStep | None = None
        enlist(self)

    @staticmethod
    def of_model(
        model: PreTrainedModel,
        draftable: Tensor | None = None,
        prompt_layers: Sequence[int] = (),
        vocabulary: int | None = None,
    ) -> Batched:
        """A model of a known family; draftable [N]: the tokens to give scores, if not all.
        vocabulary: of `Stack`."""
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        limit, encode = position_limit(model.config), encoder_of(model)
        stack = read_stack(model)
        if draftable is not None:
            stack = stack.drafting(draftable.to(stack.device))
        stack = replace(stack, vocabulary=vocabulary)
        return Batched(stack, encode, limit, rotary, prompt_layers=prompt_layers)

    @without_gradients
    def compile(self, how: Compile) -> str:
        """Compile the calls of one sequence (`compile_calls`); a line that says what came of it."""
        self._rotate_up_to(1)
        given = (self._rotations, self._limit, self._embeds or self._embed is not None, self._often)
        if self._sides:
            told = []
            for slots, side in self._sides.items():
                step = self._compiled_sides[slots] = CompiledStep(side, *given)
                told.append(f"{'slots' if slots else 'tokens'} of a {step.prepare(how)}")
            return "; ".join(told)
        self.compiled = CompiledStep(self.stack, *given)
        return self.compiled.prepare(how)

    def begin(self, sources: Sequence[Source]) -> list[SequenceState]:
        """Lines for new sequences; encodes their sources, where there is an encoder."""
        if self.pool is None:
            self.pool = Pool(self.stack)
        lines = [Line(self.pool) for _ in sources]
        encoded = [None] * len(lines)
        if self._encode is not None:
            encoded = self._encode(sources)
            if not self._take_crossed(lines, sources):
                self._remember_sources(lines, [group_means(e, self._pooling) for e in encoded])
        if self._prompt_layers:
            return [self._begin_behind(*parts) for parts in zip(lines, sources, strict=True)]
        return [SequenceState(*parts) for parts in zip(lines, sources, encoded, strict=True)]

    def _begin_behind(self, line: Line, source: Source) -> SequenceState:
        """A sequence whose prompt the target has read. Raises ValueError where it has not."""
        missing = sorted({*self._prompt_layers} - source.prompt.keys())
        if missing:
            raise ValueError(
                "the prompt has not been read by the target, whose keys and values of layers "
                f"{missing} this drafter takes; draft behind the target's first call, or give "
                "the source as CachedModel.read of the target returns it"
            )
        assert self.pool is not None
        keys_values = torch.cat([source.prompt[layer] for layer in self._prompt_layers])
        state = SequenceState(line, replace(source, prompt={}))
        self.take(state, source.prefix.tolist(), keys_values)
        return state

    @without_gradients
    def take(self, state: SequenceState, tokens: Sequence[int], keys_values: Tensor) -> None:
        """Go on with what another model has made of these tokens, which follow what is cached.

        Shapes: [N], keys and values of every layer in turn [2 L, heads, N, head_dim].
        """
        assert self.pool is not None
        first = state.cached
        self.pool.write(state.columns.number, first, keys_values)
        state.append(tokens, range(first, first + len(tokens)), chained=True)

    def _take_crossed(self, lines: Sequence[Line], sources: Sequence[Source]) -> bool:
        """Keep keys and values of cross-attention that the target has made; whether all have."""
        assert self.pool is not None
        wanted = self._cross_layers
        if wanted is None or any(not source.crossed.keys() >= {*wanted} for source in sources):
            return False
        for line, source in zip(lines, sources, strict=True):
            own = torch.cat([source.crossed[layer] for layer in wanted])
            self.pool.remember_source(line.number, group_means(own, self._pooling))
        return True

    def _remember_sources(self, lines: Sequence[Line], encoded: Sequence[Tensor]) -> None:
        """Keep cross-attention's keys and values of what an encoder put out."""
        assert self.pool is not None
        for group in _side_by_side([len(rows) for rows in encoded]):
            own = encoded[group]
            states = self._cross(torch.cat(list(own))).split([len(rows) for rows in own], dim=2)
            for line, keys_values in zip(lines[group], states, strict=True):
                self.pool.remember_source(line.number, keys_values)

    def _cross(self, encoded: Tensor) -> Tensor:
        """Keys and values of cross-attention of all layers. Shapes: [S, D] -> [2 L, H, S, C]."""
        of_layers = []
        for layer in self.stack.layers:
            assert layer.cross is not None
            both = layer.cross.keys_values(encoded)
            of_layers.append(both.view(len(encoded), 2, layer.cross.heads, -1))
        return torch.stack(of_layers).permute(0, 2, 3, 1, 4).flatten(0, 1)

    def call(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> list[StepOutput]:
        """Feed every sequence its tokens, in as few calls as pays; outputs in the same order."""
        assert self.pool is not None
        self.pool.tidy()
        outputs: dict[int, StepOutput] = {}
        for group in _groups(feeds):
            found = self._call([feeds[place] for place in group], tuple(layers))
            outputs |= zip(group, found, strict=True)
        record(feeds)
        return [outputs[place] for place in range(len(feeds))]

    def _call(self, feeds: Sequence[Feed], layers: tuple[int, ...]) -> list[StepOutput]:
        """One call for all. feeds must be in the order of their lines."""
        assert self.pool is not None
        numbers = [feed.state.columns.number for feed in feeds]
        starts = [feed.state.cached for feed in feeds]
        sizes = [len(feed.tokens) for feed in feeds]
        new = max(sizes)
        total = max(starts) + new
        self.pool.make_room(total)
        together = numbers[-1] - numbers[0] == len(numbers) - 1
        lines: slice | Tensor = slice(numbers[0], numbers[-1] + 1)
        if not together:
            lines = torch.tensor(numbers, device=self.device)
        rows = self._rows(feeds, starts, sizes, total, lines)
        depth = len(self.stack.layers)
        kept: dict[int, Tensor | None] = {n % depth: None for n in layers if n != -1}
        self._know_rotations(feeds)
        embedded = None if self._embed is None else self._embed(feeds, rows.ids, rows.positions)
        if self._embeds:
            embedded = pad_sequence([feed.embedded for feed in feeds], batch_first=True)
        found, (stack, compiled) = None, self._side(feeds)
        if compiled is not None and len(feeds) == 1:
            found = compiled(rows, self.pool, self._rotations, embedded, kept, feeds[0].rows)
        if found is not None:
            hidden, logits = found
        else:
            cache = self.pool.columns(lines, total)
            memory = self.pool.memory(lines, numbers)
            hidden = run_stack(stack, rows, cache, self._rotations, memory, embedded, kept)
            if not together:
                self._write_back(lines, rows.columns, cache)
            logits = self.stack.logits(_asked(hidden, feeds, sizes))
        states = {n: kept[n % depth] for n in layers if n != -1}
        return [
            StepOutput(
                own,
                hidden[line, :size],
                {n: of_layer[line, :size] for n, of_layer in states.items()},
            )
            for line, (own, size) in enumerate(
                zip(logits.split([feed.rows for feed in feeds]), sizes, strict=True)
            )
        ]

    def _side(self, feeds: Sequence[Feed]) -> tuple[Stack, CompiledStep | None]:
        """What runs a call, and what runs it compiled."""
        if not self._sides:
            return self.stack, self.compiled
        slots = self.stack.is_slot(feeds[0].tokens[0])
        return self._sides[slots], self._compiled_sides.get(slots)

    def _rows(
        self, feeds: Sequence[Feed], starts: list[int], sizes: list[int], total: int, lines
    ) -> Rows:
        new, device = max(sizes), self.device
        chains = all(feed.visible is None for feed in feeds)
        ids = torch.tensor(
            [[*f.tokens, *[0] * (new - len(f.tokens))] for f in feeds], device=device
        )
        if min(starts) == max(starts):
            start = starts[0]
            columns: Tensor | slice = slice(start, start + new)
            places = torch.arange(start, start + new, device=device).expand(len(feeds), new)
            mask = self._causal_mask(start, new) if chains else None
        else:
            first = torch.tensor(starts, device=device)
            columns = places = first[:, None] + torch.arange(new, device=device)
            mask = None
            if chains:
                mask = (torch.arange(total, device=device) <= places[..., None])[:, None]
        if chains:
            positions = places
            if self._limit is not None and max(starts) + new > self._limit:
                positions = places.clamp(max=self._limit - 1)  # padding stands anywhere
        else:
            mask = _branching_mask(feeds, starts, new, total).to(device)
            positions = torch.tensor(
                [[*f.places, *[0] * (new - len(f.tokens))] for f in feeds], device=device
            )
        keys = self._remember_positions(lines, columns, positions, total)
        told = None if self.stack.told is None else told_by(feeds, new, self.stack)
        return Rows(ids, positions, columns, mask, keys, told)

    def _remember_positions(self, lines, columns, positions: Tensor, total: int) -> Tensor | None:
        """Where the tokens of all columns stand, where distances between them are wanted."""
        assert self.pool is not None
        known = self.pool.positions
        if known is None:
            return None
        if isinstance(columns, slice) and isinstance(lines, slice):
            known[lines, columns] = positions
        else:
            own = torch.arange(len(known), device=self.device)[lines]
            if isinstance(columns, slice):
                columns = torch.arange(columns.start, columns.stop, device=self.device)[None]
            known[own[:, None], columns] = positions
        return known[lines, :total]

    def _write_back(self, lines: Tensor, columns, cache) -> None:
        """Where lines lie apart the call worked on copies: put the new columns in their place."""
        assert self.pool is not None
        own = torch.arange(len(lines), device=self.device)[:, None]
        if isinstance(columns, slice):
            columns = torch.arange(columns.start, columns.stop, device=self.device)[None]
        flat = [part for both in cache for part in both]
        for states, copied in zip(self.pool.states, flat, strict=True):
            states.transpose(1, 2)[lines[:, None], columns] = copied.transpose(1, 2)[own, columns]

    def _causal_mask(self, cached: int, new: int) -> Tensor | None:
        """Mask of chains of one length over cached and new columns, [1, 1, new, all].

        None where nothing is hidden.
        """
        if new == 1:
            return None
        if new > STRIP:
            places = torch.arange(cached + new, device=self.device)
            return (places <= places[cached:, None])[None, None]
        reach = self._strip.shape[1] - STRIP
        if cached > reach or self._strip.shape[1] == 0:
            reach = 2 * cached + STRIP
            places = torch.arange(-reach, STRIP, device=self.device)
            self._strip = places <= places[reach:, None]
        return self._strip[None, None, :new, reach - cached : reach + new]

    def _know_rotations(self, feeds: Sequence[Feed]) -> None:
        """Have the rotations of all positions that are fed.

        They depend on nothing but the position: where they change with the length of the text,
        `position_limit` ends before they do.
        """
        if self._rotary is None:
            return
        needed = 1 + max(max(feed.places) for feed in feeds)
        needed = max(needed, max(f.state.cached for f in feeds) + max(len(f.tokens) for f in feeds))
        self._rotate_up_to(needed)

    def _rotate_up_to(self, needed: int) -> None:
        if self._rotary is None:
            return
        size = max(256, 2 * needed)
        if self._limit is not None:
            needed, size = min(needed, self._limit), min(size, self._limit)
        if self._rotations is not None and needed <= len(self._rotations.cos):
            return
        places = torch.arange(size, device=self.device)[None]
        like = torch.empty(0, dtype=self.stack.dtype, device=self.device)
        cos, sin = self._rotary(like, position_ids=places)
        self._rotations = Rotations(cos[0], sin[0])


def _side_by_side(lengths: Sequence[int]) -> Iterator[slice]:
    """Sources that follow each other, with `STATES_AT_ONCE` states together where one has fewer."""
    first, count = 0, 0
    for place, length in enumerate(lengths):
        if place > first and count + length > STATES_AT_ONCE:
            yield slice(first, place)
            first, count = place, 0
        count += length
    yield slice(first, len(lengths))


def _groups(feeds: Sequence[Feed]) -> Iterator[list[int]]:
    """Which feeds go together: those of like size, so that no padding costs more than it saves.

    Places of the feeds, in the order of their lines.
    """
    waiting = sorted(range(len(feeds)), key=lambda place: -len(feeds[place].tokens))
    while waiting:
        largest = len(feeds[waiting[0]].tokens)
        least = 0 if largest <= SMALL else largest // 2
        count = sum(len(feeds[place].tokens) > least for place in waiting)
        group, waiting = waiting[:count], waiting[count:]
        yield sorted(group, key=lambda place: feeds[place].state.columns.number)


def _asked(hidden: Tensor, feeds: Sequence[Feed], sizes: list[int]) -> Tensor:
    """The rows that are given logits, one feed after the other. Shapes: [B, N, D] -> [R, D]."""
    if len(feeds) == 1:
        return hidden[0, sizes[0] - feeds[0].rows :]
    new = hidden.shape[1]
    wanted = [
        line * new + row
        for line, (feed, size) in enumerate(zip(feeds, sizes, strict=True))
        for row in range(size - feed.rows, size)
    ]
    if not wanted:
        return hidden[0, :0]
    return hidden.flatten(0, 1)[torch.tensor(wanted, device=hidden.device)]


def _branching_mask(feeds: Sequence[Feed], starts: list[int], new: int, total: int) -> Tensor:
    """[B, 1, N, C]: chains see what is before them, branches what they say, padding all."""
    mask = np.ones((len(feeds), 1, new, total), dtype=bool)
    for line, (feed, start) in enumerate(zip(feeds, starts, strict=True)):
        size = len(feed.tokens)
        if feed.visible is None:
            rows = np.arange(start, start + size)
            mask[line, 0, :size] = np.arange(total) <= rows[:, None]
        else:
            mask[line, 0, :size, : start + size] = feed.visible.numpy()
            mask[line, 0, :size, start + size :] = False
    return torch.from_numpy(mask)
