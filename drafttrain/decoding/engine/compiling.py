"""Calls compiled by torch: one graph for each shape of a call, kept as long as weights stay.

A call of a small model is hundreds of operations, and starting them takes most of its time.
Compiled, it is one piece of work, on a GPU in a CUDA graph. Shapes are few: batch rows and tokens
are rounded up to `BATCHES` and `TOKENS`, columns to the room of the cache, which doubles, and
sources to a power of two. Longer calls, and those that read a source for the first time, run
uncompiled. The graphs look at nothing but their tensors; that weights are those they were compiled
with is checked before every call.
"""

from __future__ import annotations

import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drafttrain.decoding.engine.cache import ColumnCache
from drafttrain.decoding.engine.forward import BatchOutput, Body, ForwardBatch, version_of
from drafttrain.decoding.engine.requests import ForwardRequest

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
CALLS = (1, 3)
"""Calls until a graph is all made: on a GPU one warms up, and one is recorded."""

Step = Callable[..., Any]


class Bucket(NamedTuple):
    """The shape of a compiled call."""

    rows: int
    tokens: int
    columns: int
    source: int
    """States of each source; 0: there is none."""


ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""What peft's layers compute by, beside their tensors."""


class Watched:
    """What modules compute with: tells whether any of it has changed, been replaced or been hooked,
    adapters included. Graphs look at nothing but their arguments."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots, self._known = roots, None
        self._look()

    def has_changed(self) -> bool:
        """Whether anything has, since the last time that this was asked."""
        if self._known == self._state():
            return False
        before = self._hooks
        self._look()
        known, self._known = self._known, self._state()
        # Transformers leaves hooks behind that collect hidden states
        return known is None or known[1:] != self._known[1:] or before != self._hooks

    def _look(self) -> None:
        """Find all modules; what is compared in every call are their own dictionaries."""
        modules = list({module: None for root in self._roots for module in root.modules()})
        self._own = [one.__dict__ for one in modules]
        self._hooked = [
            own for one in modules for own in (one._forward_hooks, one._forward_pre_hooks)
        ]
        self._adapters = [own for own in self._own if ADAPTER_STATE[0] in own]
        self._children = [one._modules for one in modules if one._modules]
        self._tensors = [own for one in modules for own in (one._parameters, one._buffers) if own]
        self._held = self._all_tensors()  # as long as they live, no other gets the id of one
        hooks = [hook for own in self._hooked for hook in own.values()]
        self._hooks = [one for one in hooks if not one.__module__.startswith("transformers.")]

    def _all_tensors(self) -> list[Tensor]:
        return [one for own in self._tensors for one in own.values() if one is not None]

    def _state(self) -> tuple[Any, ...]:
        tensors = self._all_tensors()
        return (
            [len(own) for own in self._hooked],
            [own.get("forward") for own in self._own],
            [str([own.get(name) for name in ADAPTER_STATE]) for own in self._adapters],
            [child for own in self._children for child in own.values()],
            [version_of(one) for one in tensors],
            list(map(id, tensors)),
        )


class Graphs:
    """Steps of tensors alone, compiled one for each shape, as long as weights stay. What cannot be
    compiled runs as it is, and a line says why."""

    def __init__(self, roots: Sequence[nn.Module], device: torch.device) -> None:
        """roots: modules that hold all that steps compute with."""
        self._watched, self.device = Watched(roots), device
        self._steps: dict[Any, Step] = {}
        self.failed = False
        self.compilations = 0
        """Graphs made so far."""

    def run(
        self,
        key: Any,
        make: Callable[[], Step],
        given: Mapping[str, Any],
        what: str,
        static: Sequence[Tensor] = (),
    ) -> Any:
        """What the step of a shape returns; static: tensors that it writes to."""
        if self._watched.has_changed():
            self._steps.clear()
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._compile(make(), given, what, static)
        found = step(**given)
        if self.device.type == "cuda":  # a graph writes to the same memory again
            return tree_map_only(Tensor, Tensor.clone, found)
        return found

    def _compile(
        self, step: Step, given: Mapping[str, Any], what: str, static: Sequence[Tensor]
    ) -> Step:
        """The step compiled by a call of it; the uncompiled one where that fails."""
        began = perf_counter()
        # torch keeps what it compiled by the code
        code = step.__code__.replace(co_name=f"step_{next(COUNT)}")
        step = FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)
        try:
            compiled = _compiled(step, self.device)
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                for tensor in static:
                    torch._dynamo.mark_static_address(tensor)
                for _ in range(CALLS[self.device.type == "cuda"]):
                    compiled(**given)
        except Exception as error:  # whatever torch.compile, or a C++ compiler, comes upon
            self.failed = True
            say(f"calls run uncompiled from here on: {first_line(error)}")
            return step
        self.compilations += 1
        gc.collect()  # torch's tracing leaves cycles that hold our frames, and so rows of the cache
        say(f"{what} compiled in {perf_counter() - began:.0f} s")
        return compiled


class CompiledBody:
    """Compiled calls of one decoder."""

    def __init__(self, body: Body) -> None:
        self.body, self.graphs = body, Graphs(body.modules, body.device)

    def bucket_of(self, cache: ColumnCache, requests: Sequence[ForwardRequest]) -> Bucket | None:
        """The shape that these feeds are called in; None: they run uncompiled."""
        new = max(request.size for request in requests)
        numbers = [request.state.columns.number for request in requests]
        tokens = next((size for size in TOKENS if size >= new), None)
        rows = next((size for size in BATCHES if size > max(numbers)), None)
        if self.graphs.failed or tokens is None or rows is None or not cache.is_ready:
            return None
        cache.reserve_columns(max(request.state.cached for request in requests) + new + 1)
        if rows > cache.placement.capacity[0]:
            return None
        source = 0
        if self.body.cross_attends:
            source = cache.source_capacity
            if self.body.masks_sources:
                source = source_bucket(source)
                cache.reserve_sources(source)
            elif {cache.source_lengths[number] for number in numbers} != {source}:
                return None
        return Bucket(rows, tokens, cache.placement.capacity[1], source)

    def __call__(self, call: ForwardBatch, bucket: Bucket) -> BatchOutput:
        """One call in the shape of a bucket, inside `Body.prepared`."""
        given = {name: getattr(call, name) for name in TENSORS}
        there = tuple(given[name] is not None for name in TENSORS)
        what = (
            f"{type(self.body).__name__}: calls of {bucket.rows} x {bucket.tokens} tokens over "
            f"{bucket.columns} columns"
        )
        static = [one for layer in call.cache.layers for one in (layer.keys, layer.values)]
        key, make = (bucket, tuple(call.layers), there), partial(_make_step, self.body, call)
        return BatchOutput(*self.graphs.run(key, make, given, what, static))


class CompiledEncoder:
    """A compiled encoder of texts: their number and lengths are rounded up, and masked."""

    def __init__(self, encoder: Step, roots: Sequence[nn.Module], device: torch.device) -> None:
        """encoder: (ids [B, S], mask [B, S], 1 = token) -> states [B, S, D]."""
        self._encoder, self.graphs = encoder, Graphs(roots, device)

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The states of some texts. Shapes: [B, S], [B, S] -> [B, S, D]."""
        rows, length = ids.shape
        most = next((size for size in BATCHES if size >= rows), None)
        if most is None or self.graphs.failed:
            return self._encoder(ids, mask)
        wide = (0, source_bucket(length) - length, 0, most - rows)
        ids, mask = F.pad(ids, wide), F.pad(mask, wide)
        mask[rows:, 0] = 1  # a text without tokens has no states that are numbers
        what = f"Encoder: {most} texts of up to {ids.shape[1]} tokens"
        given = {"ids": ids, "mask": mask}
        found = self.graphs.run(ids.shape, partial(_make_encoding, self._encoder), given, what)
        return found[:rows, :length]


def source_bucket(length: int) -> int:
    """States of a source, rounded up."""
    return max(SOURCES, 1 << (length - 1).bit_length())


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


def _make_step(body: Body, like: ForwardBatch) -> Step:
    """A call in the shape of another."""
    cache, layers = like.cache, like.layers  # `like` itself holds tensors of one call

    def step(**given: Any) -> tuple[Tensor, Tensor, Mapping[int, Tensor]]:
        call = ForwardBatch(scored=None, cache=cache, layers=layers, **given)
        output = body.compute(call)
        return output.logits, output.hidden, output.layers

    return step


def _make_encoding(encoder: Step) -> Step:
    def step(ids: Tensor, mask: Tensor) -> Tensor:
        return encoder(ids, mask)

    return step


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
