"""Calls compiled by torch: one graph for each shape of a call, kept as long as weights stay.

A call of a small model is hundreds of operations, and starting them takes most of its time.
Compiled, it is one piece of work, on a GPU in a CUDA graph. Shapes are few: batch rows and tokens
are rounded up to `BATCHES` and `TOKENS`, columns to the room of the cache, which doubles, and
sources to a power of two. Longer calls, and those that read a source for the first time, run
uncompiled. The graphs look at nothing but their tensors; that weights are those they were compiled
with is checked before every call.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafttrain.decoding.engine.cache import ColumnCache
from drafttrain.decoding.engine.calls import Feed
from drafttrain.decoding.engine.forward import BatchedCall, Body, CallOutput, version_of

TOKENS = (1, 4, 8, 16, 32)
"""New tokens of a call; longer ones run uncompiled."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SOURCES = 16
"""Least states of a source; above, powers of two."""
CPU_OPTIONS: dict[str, Any] = {
    "freezing": True,
    "cpp_wrapper": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "max_autotune_report_choices_stats": False,
    "autotune_num_choices_displayed": 0,
}
"""Of inductor on a CPU: weights are constants, no Python runs between the pieces, and each product
is the fastest, here, of a library's and of loops that are written for its shape."""
BACKEND = "inductor"

Step = Callable[..., Any]


class Bucket(NamedTuple):
    """The shape of a compiled call."""

    rows: int
    tokens: int
    columns: int
    source: int
    """States of each source; 0: there is none."""


class CompiledBody:
    """Compiled calls of one decoder; what cannot be compiled runs as it is, and a line says why."""

    def __init__(self, body: Body) -> None:
        self.body, self._weights = body, body.weights()
        self._steps: dict[Any, Step] = {}
        self._compiled_with: tuple[Any, ...] = ()
        self._failed = False
        self.compilations = 0
        """Graphs made so far."""

    def bucket_of(self, cache: ColumnCache, feeds: Sequence[Feed]) -> Bucket | None:
        """The shape that these feeds are called in; None: they run uncompiled."""
        new = max(feed.size for feed in feeds)
        numbers = [feed.state.columns.number for feed in feeds]
        tokens = next((size for size in TOKENS if size >= new), None)
        rows = next((size for size in BATCHES if size > max(numbers)), None)
        if self._failed or tokens is None or rows is None or not cache.is_ready:
            return None
        cache.make_room(max(feed.state.cached for feed in feeds) + new + 1)
        if rows > cache.placement.room[0]:
            return None
        source = 0
        if self.body.cross_attends:
            source = cache.source_room
            if self.body.masks_sources:
                source = max(SOURCES, 1 << (source - 1).bit_length())
                cache.make_source_room(source)
            elif {cache.source_lengths[number] for number in numbers} != {source}:
                return None
        return Bucket(rows, tokens, cache.placement.room[1], source)

    def __call__(self, call: BatchedCall, bucket: Bucket) -> CallOutput:
        """One call in the shape of a bucket, inside `Body.prepared`."""
        now = tuple(map(version_of, self._weights))
        if now != self._compiled_with:
            self._steps.clear()
            self._compiled_with = now
        given = {name: getattr(call, name) for name in TENSORS}
        there = tuple(given[name] is not None for name in TENSORS)
        key = (bucket, tuple(call.layers), there)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._compile(call, bucket, given)
        logits, hidden, layers = step(**given)
        if self.body.device.type == "cuda":  # a graph writes to the same memory again
            logits, hidden = logits.clone(), hidden.clone()
            layers = {number: own.clone() for number, own in layers.items()}
        return CallOutput(logits, hidden, layers)

    def _compile(self, call: BatchedCall, bucket: Bucket, given: Mapping[str, Any]) -> Step:
        """The step of a shape, compiled by a call of it; the uncompiled one where that fails."""
        began, step = perf_counter(), _make_step(self.body, call)
        try:
            compiled = _compiled(step, self.body.device)
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                for layer in call.cache.layers:  # CUDA graphs write to the same memory again
                    torch._dynamo.mark_static_address(layer.keys)
                    torch._dynamo.mark_static_address(layer.values)
                compiled(**given)
        except Exception as error:  # whatever torch.compile, or a C++ compiler, comes upon
            self._failed = True
            say(f"calls run uncompiled from here on: {first_line(error)}")
            return step
        self.compilations += 1
        say(
            f"{type(self.body).__name__}: calls of {bucket.rows} x {bucket.tokens} tokens over "
            f"{bucket.columns} columns compiled in {perf_counter() - began:.0f} s"
        )
        return compiled


TENSORS = (
    "ids",
    "positions",
    "visible",
    "key_positions",
    "sources",
    "source_mask",
    "embedded",
    "states",
    "has_states",
)
"""What a graph is given of a call; some are None."""
COUNT = itertools.count()


def _make_step(body: Body, like: BatchedCall) -> Step:
    """A call of tensors alone, in the shape of another; its code is its own, as torch keeps what it
    compiled by the code."""

    cache, layers = like.cache, like.layers  # `like` itself holds tensors of one call

    def step(**given: Any) -> tuple[Tensor, Tensor, Mapping[int, Tensor]]:
        call = BatchedCall(scored=None, cache=cache, layers=layers, **given)
        output = body.compute(call)
        return output.logits, output.hidden, output.layers

    code = step.__code__.replace(co_name=f"step_{next(COUNT)}")
    return FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def _compiled(step: Step, device: torch.device) -> Step:
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if BACKEND == "inductor":
        on_cpu = device.type == "cpu"
        options |= CPU_OPTIONS if on_cpu else torch._inductor.list_mode_options("reduce-overhead")
    return torch.compile(step, dynamic=False, fullgraph=True, backend=BACKEND, options=options)


def say(what: str) -> None:
    print(f"compile: {what}", file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    """What went wrong, without what torch's compiler wraps it in."""
    inner = getattr(error, "inner_exception", error)
    return (str(inner).strip() or type(inner).__name__).splitlines()[0]
