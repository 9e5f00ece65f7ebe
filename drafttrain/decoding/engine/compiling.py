"""Calls compiled by torch.compile: one graph per bucket, used as long as weights do not change.

A call of a small model is hundreds of operations, and launching them takes most of its time. A
compiled call is launched as a whole, on a GPU as a CUDA graph. There are few buckets: batch rows
and tokens are rounded up to `BATCHES` and `TOKENS`, columns to the capacity of the cache, and
sources to a power of two. Longer calls and the very first call run uncompiled. The graphs have no
guards; instead, every call first checks that the modules have not changed (`Watched`).
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

from drafttrain.decoding.engine.cache import ColumnCache, KeysValues
from drafttrain.decoding.engine.forward import BatchOutput, Body, ForwardBatch, version_of
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.models.weight_files import first_line

TOKENS = (1, 4, 8, 16, 32)
"""Buckets of new tokens per sequence; longer calls run uncompiled."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Buckets of batch rows."""
SOURCES = 16
"""Smallest bucket of source lengths; larger ones are powers of two."""
CPU_OPTIONS: dict[str, Any] = {
    "freezing": True,
    "cpp_wrapper": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "max_autotune_report_choices_stats": False,
    "autotune_num_choices_displayed": 0,
}
"""Options of inductor on a CPU: weights become constants, kernels are called from C++, and for each
matrix product the fastest is chosen of a library's kernel and generated ones."""
BACKEND = "inductor"
CALLS = (1, 3)
"""Calls until a graph is ready, on a CPU and on a GPU, where one warms up and one is recorded."""

Step = Callable[..., Any]


class Bucket(NamedTuple):
    """The padded shape of a compiled call."""

    rows: int
    tokens: int
    columns: int
    source: int
    """Source length; 0: there is no source."""


ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""Attributes of peft's layers, besides tensors, that affect what they compute."""


class Watched:
    """Detects changes of modules: weights, submodules, hooks, replaced methods and adapters."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots, self._last_state = roots, None
        self._scan()

    def has_changed(self) -> bool:
        """Whether anything has changed since the last call of this method."""
        if self._last_state == self._state():
            return False
        hooks = self._hooks
        self._scan()
        before, self._last_state = self._last_state, self._state()
        # Transformers' own hooks, which collect hidden states, are not counted as a change
        return before is None or before[1:] != self._last_state[1:] or hooks != self._hooks

    def _scan(self) -> None:
        """Collects the dictionaries of all modules, which every call compares."""
        modules = list({module: None for root in self._roots for module in root.modules()})
        self._attributes = [module.__dict__ for module in modules]
        self._hook_tables = [
            hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)
        ]
        self._adapters = [table for table in self._attributes if ADAPTER_STATE[0] in table]
        self._children = [module._modules for module in modules if module._modules]
        tables = [table for one in modules for table in (one._parameters, one._buffers)]
        self._tensors = [table for table in tables if table]
        self._alive = self._all_tensors()  # keeps them alive, so that no id is used again
        hooks = [hook for table in self._hook_tables for hook in table.values()]
        self._hooks = [hook for hook in hooks if not hook.__module__.startswith("transformers.")]

    def _all_tensors(self) -> list[Tensor]:
        return [one for table in self._tensors for one in table.values() if one is not None]

    def _state(self) -> tuple[Any, ...]:
        tensors = self._all_tensors()
        return (
            [len(table) for table in self._hook_tables],
            [table.get("forward") for table in self._attributes],
            [str([table.get(name) for name in ADAPTER_STATE]) for table in self._adapters],
            [child for table in self._children for child in table.values()],
            [version_of(tensor) for tensor in tensors],
            list(map(id, tensors)),
        )


class Graphs:
    """Compiled functions of tensors, one per shape, discarded when the modules change."""

    def __init__(self, roots: Sequence[nn.Module], device: torch.device) -> None:
        """roots: modules with all weights that the functions use."""
        self._watched, self.device = Watched(roots), device
        self._steps: dict[Any, Step] = {}
        self.failed = False
        self.compilations = 0
        """Number of graphs compiled so far."""

    def run(
        self,
        key: Any,
        make: Callable[[], Step],
        arguments: Mapping[str, Any],
        name: str,
        static: Sequence[Tensor] = (),
    ) -> Any:
        """Runs the function of a shape (key), made and compiled on first use.

        static: tensors that it writes to.
        """
        if self._watched.has_changed():
            self._steps.clear()
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._compile(make(), arguments, name, static)
        result = step(**arguments)
        if self.device.type == "cuda":  # the next run of the graph overwrites its outputs
            return tree_map_only(Tensor, Tensor.clone, result)
        return result

    def _compile(
        self, step: Step, arguments: Mapping[str, Any], name: str, static: Sequence[Tensor]
    ) -> Step:
        """Compiles a function by calling it; if that fails, returns it uncompiled and says why."""
        began = perf_counter()
        # torch caches compiled functions by code object, so each gets its own
        code = step.__code__.replace(co_name=f"step_{next(COUNT)}")
        step = FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)
        on_gpu = self.device.type == "cuda"
        if on_gpu:  # on a CPU, tensors marked as static would become constants like weights
            for tensor in static:
                torch._dynamo.mark_static_address(tensor)
        # in the options of torch.compile, freezing comes too late for the tracing
        freezing = torch._inductor.config.patch(freezing=not on_gpu)
        try:
            compiled = _compiled(step, self.device)
            with freezing, warnings.catch_warnings(action="ignore", category=UserWarning):
                for _ in range(CALLS[on_gpu]):
                    compiled(**arguments)
        except Exception as error:  # torch.compile and C++ compilers may raise anything
            self.failed = True
            inner = getattr(error, "inner_exception", error)
            say(f"calls run uncompiled from here on: {first_line(inner)}")
            return step
        self.compilations += 1
        gc.collect()  # tracing leaves reference cycles, which would keep cache rows in use
        say(f"{name} compiled in {perf_counter() - began:.0f} s")
        return compiled


class CompiledBody:
    """Compiled calls of a decoder."""

    def __init__(self, body: Body) -> None:
        self.body, self.graphs = body, Graphs(body.modules, body.device)

    def bucket_of(
        self, cache: ColumnCache, requests: Sequence[ForwardRequest], first: bool
    ) -> Bucket | None:
        """Returns the bucket for these requests, or None if they must run uncompiled.

        first: the call computes the cross-attention of its sources.
        """
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
            if first:
                source = max(len(request.state.encoded) for request in requests)
            if self.body.masks_sources:
                source = source_bucket(max(source, cache.source_capacity))
                cache.reserve_sources(source)
            elif not first and {cache.source_lengths[number] for number in numbers} != {source}:
                return None
        return Bucket(rows, tokens, cache.placement.capacity[1], source)

    def __call__(self, call: ForwardBatch, bucket: Bucket) -> BatchOutput:
        """Runs a call in the shape of a bucket, inside `Body.prepared`."""
        arguments = {field: getattr(call, field) for field in TENSORS}
        present = tuple(value is not None for value in arguments.values())
        kind = "calls" if call.encoded is None else "first calls"
        name = (
            f"{type(self.body).__name__}: {kind} of {bucket.rows} x {bucket.tokens} tokens over "
            f"{bucket.columns} columns"
        )
        static = [one for layer in call.cache.layers for one in (layer.keys, layer.values)]
        key, make = (bucket, tuple(call.layers), present), partial(_make_step, self.body, call)
        return BatchOutput(*self.graphs.run(key, make, arguments, name, static))


class CompiledEncoder:
    """Compiled calls of a text encoder; batch size and length are rounded up and masked."""

    def __init__(self, encoder: Step, roots: Sequence[nn.Module], device: torch.device) -> None:
        """encoder: (ids [B, S], mask [B, S], 1 = token) -> states [B, S, D]."""
        self._encoder, self.graphs = encoder, Graphs(roots, device)

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encodes a batch of texts. Shapes: ids [B, S], mask [B, S] -> [B, S, D]."""
        rows, length = ids.shape
        padded_rows = next((size for size in BATCHES if size >= rows), None)
        if padded_rows is None or self.graphs.failed:
            return self._encoder(ids, mask)
        padding = (0, source_bucket(length) - length, 0, padded_rows - rows)
        ids, mask = F.pad(ids, padding), F.pad(mask, padding)
        mask[rows:, 0] = 1  # fully masked rows would give NaN
        name = f"Encoder: {padded_rows} texts of up to {ids.shape[1]} tokens"
        arguments = {"ids": ids, "mask": mask}
        make = partial(_make_encoding, self._encoder)
        return self.graphs.run(ids.shape, make, arguments, name)[:rows, :length]


def source_bucket(length: int) -> int:
    """Rounds a source length up to its bucket."""
    return max(SOURCES, 1 << (length - 1).bit_length())


TENSORS = (
    "ids",
    "positions",
    "visible",
    "key_positions",
    "sources",
    "source_mask",
    "encoded",
    "embedded",
)
"""Fields of `ForwardBatch` that are arguments of a compiled call; some are None."""
COUNT = itertools.count()


def _make_step(body: Body, like: ForwardBatch) -> Step:
    """Returns a function that runs calls of the same shape as `like`."""
    cache, layers = like.cache, like.layers  # do not keep the tensors of `like` alive

    def step(**arguments: Any) -> tuple[Tensor, Tensor, Mapping[int, Tensor], list[KeysValues]]:
        call = ForwardBatch(scored=None, cache=cache, layers=layers, **arguments)
        output = body.compute(call)
        return output.logits, output.hidden, output.layers, output.sources

    return step


def _make_encoding(encoder: Step) -> Step:
    def step(ids: Tensor, mask: Tensor) -> Tensor:  # a plain function, which `Graphs` can copy
        return encoder(ids, mask)

    return step


def _compiled(step: Step, device: torch.device) -> Step:
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if BACKEND == "inductor":
        on_cpu = device.type == "cpu"
        options |= CPU_OPTIONS if on_cpu else torch._inductor.list_mode_options("reduce-overhead")
    return torch.compile(step, dynamic=False, fullgraph=True, backend=BACKEND, options=options)


def say(message: str) -> None:
    """Prints a status line to stderr."""
    print(f"compile: {message}", file=sys.stderr, flush=True)
