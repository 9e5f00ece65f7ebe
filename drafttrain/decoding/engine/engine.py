"""Batched forward calls of a decoder: chains of any lengths and draft trees of many sequences."""

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from drafttrain.config.commands import Compile
from drafttrain.decoding.engine.cache import COLUMNS, ColumnCache
from drafttrain.decoding.engine.compiling import TOKENS, Bucket, CompiledBody
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.forward import Body, ForwardBatch
from drafttrain.decoding.engine.requests import ForwardOutput, ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.types import NO_TOKEN, Source

SMALL = 16
"""Requests of up to this many tokens are batched with any shorter ones; longer ones only with
requests of more than half their size, so that padding costs no more than batching saves."""


ByRow = Mapping[int, ForwardRequest]
"""The requests of a call by batch row."""


class Engine:
    """Runs a decoder's batched calls and holds the cache of all its sequences."""

    def __init__(
        self,
        body: Body,
        encode: Encoder | None = None,
        limit: int | None = None,
        one_chain: bool = False,
    ) -> None:
        """limit: number of positions; None: no limit. one_chain: a call is one sequence's chain,
        because the model computes its own masks and positions."""
        self.body, self.device = body, body.device
        self.cache = ColumnCache()
        self.encode, self._limit, self._one_chain = encode, limit, one_chain
        self.compiled: CompiledBody | None = None
        ENGINES.add(self)

    def begin(self, sources: Sequence[Source]) -> list[SequenceState]:
        """Runs the encoder, if there is one, and opens a cache row for each new sequence."""
        encoded: Sequence[Tensor | None] = [None] * len(sources)
        if self.encode is not None:
            encoded = self.encode(sources)
        return [SequenceState(self.cache, *both) for both in zip(sources, encoded, strict=True)]

    @without_gradients
    def take(self, state: SequenceState, tokens: Sequence[int], keys_values: Tensor) -> None:
        """Appends keys and values that another model computed for a chain of tokens.

        Shapes: tokens [N], keys and values of every layer in turn [2 L, heads, N, head_dim].
        """
        first = state.cached
        self.cache.write(state.row, first, keys_values)
        state.append(tokens, range(first, first + len(tokens)), is_chain=True)

    @without_gradients
    def forward_batch(
        self, requests: Sequence[ForwardRequest], layers: Sequence[int] = ()
    ) -> list[ForwardOutput]:
        """Runs the requests in few calls, grouped by size; returns outputs in the same order."""
        outputs: dict[int, ForwardOutput] = {}
        for group in self._groups(requests):
            results = self._forward_group([requests[index] for index in group], layers)
            outputs |= zip(group, results, strict=True)
        for request in requests:
            tokens = [*request.tokens, *[NO_TOKEN] * (request.size - len(request.tokens))]
            request.state.append(tokens, request.token_positions, request.visible is None)
        return [outputs[index] for index in range(len(requests))]

    def _groups(self, requests: Sequence[ForwardRequest]) -> Iterator[list[int]]:
        """Yields the indices of requests that form a call, in the order of their cache rows.

        They have similar sizes, are all first calls or none, and their sources have one length
        unless sources can be masked.
        """
        if self._one_chain:
            yield from ([index] for index in range(len(requests)))
            return
        by_size = sorted(range(len(requests)), key=lambda index: -requests[index].size)
        same_length = self.body.cross_attends and not self.body.masks_sources
        parts: dict[tuple[bool, int], list[int]] = {}
        for index in by_size:
            state = requests[index].state
            length = len(state.encoded) if same_length else 0
            parts.setdefault((state.has_cross_attention, length), []).append(index)
        for part in parts.values():
            while part:
                largest = requests[part[0]].size
                least = 0 if largest <= SMALL else largest // 2
                count = sum(requests[index].size > least for index in part)
                group, part = part[:count], part[count:]
                yield sorted(group, key=lambda index: requests[index].state.row)

    def _forward_group(
        self, requests: Sequence[ForwardRequest], layers: Sequence[int]
    ) -> list[ForwardOutput]:
        """Runs one group of requests as a single call, compiled if possible."""
        layers = [layer for layer in layers if layer != -1]
        first = self.body.cross_attends and not requests[0].state.has_cross_attention
        bucket, by_row = None, dict(enumerate(requests))
        if self.compiled is not None:
            bucket = self.compiled.bucket_of(self.cache, requests, first)
        if bucket is not None:
            by_row = {request.state.row: request for request in requests}
        call = self._batched(by_row, layers, first, bucket)
        with self.body.prepared(layers):
            output = self.body.compute(call) if bucket is None else self.compiled(call, bucket)
        if first:
            for b, request in by_row.items():
                length = len(request.state.encoded)  # without padding
                sources = [states[b, :, :length] for states in output.sources]
                self.cache.write_source(request.state.row, sources)
                request.state.has_cross_attention = True
        scored = range(call.ids.shape[1]) if call.scored is None else _scored_tokens(requests)
        results = []
        for b, request in by_row.items():
            size, kept = request.size, request.logits_to_keep
            begin = scored.index(size - kept) if kept else 0
            states = {number: of_layer[b, :size] for number, of_layer in output.layers.items()}
            logits = output.logits[b, begin : begin + kept]
            results.append(ForwardOutput(logits, output.hidden[b, :size], states))
        return results

    def _place(self, by_row: ByRow, bucket: Bucket | None) -> Tensor:
        """Sets the cache's placement of a call; returns the columns [B, N] of its new tokens.

        bucket: the shape of the call, whose batch rows are the first rows of the cache; None: the
        smallest shape, with one batch row per request.
        """
        placement, device, requests = self.cache.placement, self.device, list(by_row.values())
        if bucket is None:
            rows, new = [one.state.row for one in requests], max(one.size for one in requests)
            count, used = len(rows), max(one.state.cached for one in requests) + new
            self.cache.reserve_columns(used)
            placement.rows = slice(rows[0], rows[-1] + 1)
            if rows[-1] - rows[0] != count - 1:
                placement.rows = torch.tensor(rows, device=device)
        else:
            count, new, used, _ = bucket
            placement.rows = slice(0, count)
        starts = [by_row[b].state.cached if b in by_row else used for b in range(count)]
        placement.used, placement.cached = used, starts[0] if self._one_chain else 0
        columns = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
        if bucket is not None:  # only padding is clamped, to a last column that no sequence uses
            columns = columns.clamp(max=used - 1)
        placement.columns = columns
        if bucket is None and min(starts) == max(starts) and isinstance(placement.rows, slice):
            placement.columns = slice(starts[0], used)
        return columns

    def _batched(
        self, by_row: ByRow, layers: Sequence[int], first: bool, bucket: Bucket | None
    ) -> ForwardBatch:
        """Builds the call for the requests of batch rows.

        first: the call computes cross-attention. bucket: as in `_place`.
        """
        requests, device = list(by_row.values()), self.device
        columns, used = self._place(by_row, bucket), self.cache.placement.used
        count, new = columns.shape
        ids = {b: torch.tensor(one.tokens, dtype=torch.long) for b, one in by_row.items()}
        ids = _padded(ids, count, new).to(device)
        # causal chains; padding gets arbitrary valid positions
        visible = torch.arange(used, device=device) <= columns[..., None]
        # a copy: a compiled call would assume that two arguments are always the same tensor
        positions = columns.clone() if self._limit is None else columns.clamp(max=self._limit - 1)
        for b, request in by_row.items():
            size, end = request.size, request.state.cached + request.size
            if request.drafted is not None:
                ids[b, len(request.tokens) : size] = request.drafted.clamp_min(0)
            if request.positions is not None:
                positions[b, :size] = torch.tensor(list(request.positions))
            if request.visible is not None:
                visible[b, :size, :end] = request.visible.to(device)
        call = ForwardBatch(ids, positions, visible, self.cache.self_attention, layers=layers)
        scored = _scored_tokens(requests)
        if bucket is None and len(scored) < new:
            call.scored = torch.tensor(scored, dtype=torch.long, device=device)
        if self.body.needs_key_positions:
            call.key_positions = self._key_positions(by_row, columns, positions)
        if requests[0].embedded is not None:
            call.embedded = _padded({b: one.embedded for b, one in by_row.items()}, count, new)
        if self.body.cross_attends:
            self._set_sources(call, by_row, first, bucket)
        return call

    def _key_positions(self, by_row: ByRow, columns: Tensor, positions: Tensor) -> Tensor:
        """Returns the positions [B, C] of all columns that a call reads."""
        used = torch.arange(self.cache.placement.used, device=self.device)
        key_positions = used.repeat(len(columns), 1)
        for b, request in by_row.items():
            if request.state.chain < request.state.cached:
                cached = torch.tensor(request.state.positions, device=self.device)
                key_positions[b, : len(cached)] = cached
        return key_positions.scatter_(1, columns, positions)

    def _set_sources(
        self, call: ForwardBatch, by_row: ByRow, first: bool, bucket: Bucket | None
    ) -> None:
        """Sets the call's source: encoder states in a first call, else cached cross-attention."""
        requests = [by_row.get(b) for b in range(len(call.ids))]
        lengths = [1 if request is None else len(request.state.encoded) for request in requests]
        size = max(lengths) if bucket is None else bucket.source
        if first:
            states = {b: request.state.encoded for b, request in by_row.items()}
            call.encoded = _padded(states, len(lengths), size)
        else:
            call.sources = self.cache.sources(self.cache.placement.rows, size)
        # compiled calls always have a mask: without, they would be compiled once more
        if min(lengths) != size or (bucket is not None and self.body.masks_sources):
            ends = torch.tensor(lengths, device=self.device)[:, None]
            call.source_mask = torch.arange(size, device=self.device) < ends


ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
"""All engines of this process."""


def compile_calls(how: Compile) -> None:
    """Compiles the calls of all engines from now on, each shape when it is first used.

    auto: only on a GPU, because compiling takes minutes on a CPU.
    """
    for engine in list(ENGINES):
        compiles = how == "on" or (how == "auto" and engine.device.type != "cpu")
        if compiles and engine.compiled is None:
            engine.compiled = CompiledBody(engine.body)
            if engine.encode is not None:
                engine.encode.compile()


def reserve(columns: int) -> None:
    """Allocates columns for this many tokens and a draft in all compiled engines, because calls are
    compiled again when the cache grows."""
    columns = -(-(columns + TOKENS[-1]) // COLUMNS) * COLUMNS
    for engine in list(ENGINES):
        if engine.compiled is not None:
            engine.cache.reserve_columns(columns)


def _scored_tokens(requests: Sequence[ForwardRequest]) -> list[int]:
    """Returns the token indices, ascending, whose logits at least one request needs."""
    last_rows = [range(one.size - one.logits_to_keep, one.size) for one in requests]
    return sorted(set().union(*last_rows))


def _padded(rows: Mapping[int, Tensor], count: int, length: int) -> Tensor:
    """Returns [count, length, ...]: the given batch rows and zeros."""
    like = next(iter(rows.values()))
    padded = like.new_zeros(count, length, *like.shape[1:])
    for b, row in rows.items():
        padded[b, : len(row)] = row
    return padded
