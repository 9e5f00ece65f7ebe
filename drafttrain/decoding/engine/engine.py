"""Many sequences of one decoder, fed in shared calls: chains of any lengths, and draft trees."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.config.commands import Compile
from drafttrain.decoding.engine.cache import COLUMNS, ColumnCache, KeysValues
from drafttrain.decoding.engine.compiling import TOKENS, Bucket, CompiledBody
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.forward import Body, ForwardBatch
from drafttrain.decoding.engine.requests import ForwardOutput, ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.types import NO_TOKEN, Source

SMALL = 16
"""Requests of up to this many tokens share a call with any shorter ones; longer ones only with
those at least half as long, so that padding costs no more than it saves."""


class Engine:
    """Calls a decoder, and keeps the cache of all its sequences."""

    def __init__(
        self,
        body: Body,
        encode: Encoder | None = None,
        limit: int | None = None,
        one_chain: bool = False,
    ) -> None:
        """limit: positions that there are; None: no limit. one_chain: calls are of one sequence's
        chain, as the model places tokens itself."""
        self.body, self.device = body, body.device
        self.cache = ColumnCache(body.device)
        self.encode, self._limit, self._one_chain = encode, limit, one_chain
        self.compiled: CompiledBody | None = None
        ENGINES.add(self)

    def begin(self, sources: Sequence[Source]) -> list[SequenceState]:
        """A row of the cache for each new sequence; encodes sources, where there is an encoder."""
        encoded: Sequence[Tensor | None] = [None] * len(sources)
        if self.encode is not None:
            encoded = self.encode(sources)
        return [
            SequenceState(self.cache.open(), source, own)
            for source, own in zip(sources, encoded, strict=True)
        ]

    @without_gradients
    def take(self, state: SequenceState, tokens: Sequence[int], keys_values: Tensor) -> None:
        """Cache what another model computed for these tokens, which follow what is cached.

        Shapes: [N], keys and values of every layer in turn [2 L, heads, N, head_dim].
        """
        first = state.cached
        self.cache.write(state.columns.number, first, keys_values)
        state.append(tokens, range(first, first + len(tokens)), is_chain=True)

    @without_gradients
    def forward_batch(
        self, requests: Sequence[ForwardRequest], layers: Sequence[int] = ()
    ) -> list[ForwardOutput]:
        """Run the requests in few calls, grouped by size; outputs in the same order."""
        outputs: dict[int, ForwardOutput] = {}
        for group in self._groups(requests):
            found = self._forward_group([requests[place] for place in group], layers)
            outputs |= zip(group, found, strict=True)
        for request in requests:
            tokens = [*request.tokens, *[NO_TOKEN] * (request.size - len(request.tokens))]
            is_chain = request.visible is None
            request.state.append(tokens, request.token_positions, is_chain)
        return [outputs[place] for place in range(len(requests))]

    def _groups(self, requests: Sequence[ForwardRequest]) -> Iterator[list[int]]:
        """Which requests share a call: those of like size, a source's first call apart, and sources
        of one length where they cannot be masked; places of the feeds, in the order of their rows.
        """
        if self._one_chain:
            yield from ([place] for place in range(len(requests)))
            return
        waiting = sorted(range(len(requests)), key=lambda place: -requests[place].size)
        parts: dict[tuple[bool, int], list[int]] = {}
        for place in waiting:
            state = requests[place].state
            masked = self.body.masks_sources or not self.body.cross_attends
            length = 0 if masked else len(state.encoded)
            parts.setdefault((self._is_first(state), length), []).append(place)
        for part in parts.values():
            while part:
                largest = requests[part[0]].size
                least = 0 if largest <= SMALL else largest // 2
                count = sum(requests[place].size > least for place in part)
                group, part = part[:count], part[count:]
                yield sorted(group, key=lambda place: requests[place].state.columns.number)

    def _is_first(self, state: SequenceState) -> bool:
        """Whether a call makes what cross-attention reads of a source."""
        return self.body.cross_attends and not state.columns.knows_source

    def _forward_group(
        self, requests: Sequence[ForwardRequest], layers: Sequence[int]
    ) -> list[ForwardOutput]:
        layers = [layer for layer in layers if layer != -1]
        first, bucket = self._is_first(requests[0].state), None
        if self.compiled is not None and not first:
            bucket = self.compiled.bucket_of(self.cache, requests)
        call = self._batched(requests, layers, first, bucket)
        with self.body.prepared(layers):
            output = self.body.compute(call) if bucket is None else self.compiled(call, bucket)
        if first and self.body.cross_attends:
            self._remember_sources(requests, output.sources)
        rows = range(call.ids.shape[1]) if call.scored is None else _wanted(requests)
        index = {row: place for place, row in enumerate(rows)}
        found = []
        for place, request in enumerate(requests):
            b = place if bucket is None else request.state.columns.number
            size = request.size
            begin = index[size - request.logits_to_keep] if request.logits_to_keep else 0
            logits = output.logits[b, begin : begin + request.logits_to_keep]
            states = {number: of_layer[b, :size] for number, of_layer in output.layers.items()}
            found.append(ForwardOutput(logits, output.hidden[b, :size], states))
        return found

    def _remember_sources(
        self, requests: Sequence[ForwardRequest], made: Sequence[KeysValues]
    ) -> None:
        """Keep what a first call made for cross-attention."""
        for b, request in enumerate(requests):
            length = len(request.state.encoded)
            own = [(keys[b, :, :length], values[b, :, :length]) for keys, values in made]
            self.cache.remember_source(request.state.columns.number, own)

    def _batched(
        self,
        requests: Sequence[ForwardRequest],
        layers: Sequence[int],
        first: bool = False,
        bucket: Bucket | None = None,
    ) -> ForwardBatch:
        """One call for these feeds, in the order of their rows; places its tokens in the cache.

        first: it makes what cross-attention reads. bucket: the shape of the call, whose batch rows
        are the first ones of the cache; None: as small as the feeds allow.
        """
        place, device = self.cache.placement, self.device
        numbers = [request.state.columns.number for request in requests]
        starts = [request.state.cached for request in requests]
        new = max(request.size for request in requests)
        members: Sequence[ForwardRequest | None] = requests
        if bucket is None:
            used = max(starts) + new
            self.cache.reserve_columns(used)
            place.rows = slice(numbers[0], numbers[-1] + 1)
            if numbers[-1] - numbers[0] != len(numbers) - 1:
                place.rows = torch.tensor(numbers, device=device)
        else:
            new, used = bucket.tokens, bucket.columns
            by_row = dict(zip(numbers, requests, strict=True))
            members = [by_row.get(row) for row in range(bucket.rows)]
            starts = [used if own is None else own.state.cached for own in members]
            place.rows = slice(0, bucket.rows)
        place.used, place.cached = used, starts[0] if self._one_chain else 0
        first_columns = torch.tensor(starts, device=device)[:, None]
        columns = first_columns + torch.arange(new, device=device)
        place.columns = columns
        if bucket is not None:  # what nobody reads goes to the last column
            place.columns = columns = columns.clamp(max=used - 1)
        elif min(starts) == max(starts):
            place.columns = slice(starts[0], used)
        ids = [torch.tensor([] if own is None else own.tokens, dtype=torch.long) for own in members]
        positions = self._positions(members, columns)
        call = ForwardBatch(
            ids=_drafted_too(_padded(ids, new).to(device), members),
            positions=positions,
            visible=_visible(members, starts, columns, used),
            key_positions=None,
            scored=None if bucket is not None else self._scored(requests, new),
            cache=self.cache.own,
            layers=layers,
        )
        if self.body.needs_key_positions:
            call.key_positions = self._key_positions(members, columns, positions, used)
        if requests[0].embedded is not None:
            width = requests[0].embedded.shape[1]
            nothing = requests[0].embedded.new_zeros(0, width)
            call.embedded = _padded([nothing if f is None else f.embedded for f in members], new)
        if any(request.states is not None for request in requests):
            call.states, call.has_states = _states(members, new, device)
        if self.body.cross_attends:
            self._give_sources(call, members, first, bucket)
        return call

    def _scored(self, requests: Sequence[ForwardRequest], new: int) -> Tensor | None:
        """[R] rows that some feed wants logits of; None: all."""
        wanted = _wanted(requests)
        if len(wanted) == new:
            return None
        return torch.tensor(wanted, dtype=torch.long, device=self.device)

    def _positions(self, members: Sequence[ForwardRequest | None], columns: Tensor) -> Tensor:
        """[B, N] positions of the new tokens; padding stands anywhere within the limit."""
        # a tensor of its own: compiled calls take two that are one for one always
        positions = columns.clone() if self._limit is None else columns.clamp(max=self._limit - 1)
        for b, request in enumerate(members):
            if request is not None and request.positions is not None:
                positions[b, : request.size] = torch.tensor(list(request.positions))
        return positions

    def _key_positions(
        self,
        members: Sequence[ForwardRequest | None],
        columns: Tensor,
        positions: Tensor,
        used: int,
    ) -> Tensor:
        """[B, C] positions of all columns that a call reads."""
        found = torch.arange(used, device=self.device).repeat(len(members), 1)
        for b, request in enumerate(members):
            if request is not None and request.state.chain < request.state.cached:
                own = torch.tensor(request.state.positions, device=self.device)
                found[b, : len(own)] = own
        return found.scatter_(1, columns, positions)

    def _give_sources(
        self,
        call: ForwardBatch,
        members: Sequence[ForwardRequest | None],
        first: bool,
        bucket: Bucket | None,
    ) -> None:
        """What cross-attention reads: encoder states of new sequences, else what is cached."""
        if first:
            states = [request.state.encoded for request in members]
            call.encoded = pad_sequence(states, batch_first=True)
            lengths = [len(own) for own in states]
        else:
            known = self.cache.source_lengths
            lengths = [1 if f is None else known[f.state.columns.number] for f in members]
            size = max(lengths) if bucket is None else bucket.source
            call.sources = self.cache.sources(self.cache.placement.rows, size)
        size = call.encoded.shape[1] if first else call.sources[0][0].shape[2]
        if min(lengths) != size:
            ends = torch.tensor(lengths, device=self.device)[:, None]
            call.source_mask = torch.arange(size, device=self.device) < ends


ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
"""All there are in this process."""


def compile_calls(how: Compile) -> None:
    """Have the calls of all engines compiled from now on, each shape when it is first called.

    auto: those on a GPU alone, as compiling takes minutes on a CPU.
    """
    for engine in list(ENGINES):
        wanted = how == "on" or (how == "auto" and engine.device.type != "cpu")
        if wanted and engine.compiled is None:
            engine.compiled = CompiledBody(engine.body)
            if engine.encode is not None:
                engine.encode.compile()


def reserve(columns: int) -> None:
    """Have room for so many tokens of a sequence, and a draft, in all compiled engines: where it
    grew in the middle of a run, calls would be compiled again."""
    columns = -(-(columns + TOKENS[-1]) // COLUMNS) * COLUMNS
    for engine in list(ENGINES):
        if engine.compiled is not None:
            engine.cache.reserve_columns(columns)


def _wanted(requests: Sequence[ForwardRequest]) -> list[int]:
    """Rows of a call whose logits some request returns, rising."""
    last_rows = [range(one.size - one.logits_to_keep, one.size) for one in requests]
    return sorted(set().union(*last_rows))


def _padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """[B, length, ...] rows of up to so many, with zeros after them."""
    found = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for b, own in enumerate(rows):
        found[b, : len(own)] = own
    return found


def _drafted_too(ids: Tensor, members: Sequence[ForwardRequest | None]) -> Tensor:
    """The tokens of a call with those that only the device knows. Shapes: [B, N] -> [B, N]."""
    for b, request in enumerate(members):
        if request is not None and request.drafted is not None:
            ids[b, len(request.tokens) : request.size] = request.drafted.clamp_min(0)
    return ids


def _visible(
    members: Sequence[ForwardRequest | None], starts: Sequence[int], columns: Tensor, used: int
) -> Tensor:
    """[B, N, C]: chains see what is before them and themselves, branches what they name."""
    device = columns.device
    visible = torch.arange(used, device=device) <= columns[..., None]
    for b, (request, start) in enumerate(zip(members, starts, strict=True)):
        if request is not None and request.visible is not None:
            size = request.size
            visible[b, :size, start + size :] = False
            visible[b, :size, : start + size] = request.visible.to(device)
    return visible


def _states(
    members: Sequence[ForwardRequest | None], new: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Target hidden states that come with the tokens of a call (`ForwardBatch.states`)."""
    given = [None if request is None else request.states for request in members]
    like = next(states for states in given if states is not None)
    states = torch.zeros(len(given), new, like.shape[1], dtype=like.dtype, device=device)
    there = torch.zeros(len(given), new, 1, dtype=torch.bool, device=device)
    for b, own in enumerate(given):
        if own is not None:
            states[b, : len(own)] = own
            there[b, : len(own)] = True
    return states, there
