"""Calls compiled by torch.compile: one graph per bucket, used as long as weights do not change.

A call of a small model is hundreds of operations, and launching them takes most of its time. A
compiled call is launched as a whole, on a GPU as a CUDA graph. There are few buckets: batch rows
and tokens are rounded up to `BATCHES` and `TOKENS`, columns to the capacity of the cache, and
sources to a power of two. Longer calls and the very first call run uncompiled. The graphs have no
guards; instead, every call first checks that the modules have not changed (`Watched`).
"""

import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drafttrain.decoding.engine.cache import ColumnCache, cached_tensors
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
COUNT = itertools.count()


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
        self._steps: dict[Any, Callable[..., Any]] = {}
        self.failed = False
        self.compilations = 0
        """Number of graphs compiled so far."""

    def run(
        self,
        key: Any,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        name: str,
        static: Sequence[Tensor] = (),
    ) -> Any:
        """Runs the function of a shape (key), compiled on first use.

        static: tensors that it writes to.
        """
        if self._watched.has_changed():
            self._steps.clear()
        if key not in self._steps:
            self._steps[key] = self._compile(function, arguments, name, static)
        result = self._steps[key](**arguments)
        if self.device.type == "cuda":  # the next run of the graph overwrites its outputs
            return tree_map_only(Tensor, Tensor.clone, result)
        return result

    def _compile(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        name: str,
        static: Sequence[Tensor],
    ) -> Callable[..., Any]:
        """Compiles a function by calling it; if that fails, returns it uncompiled and says why."""

        def step(**arguments: Any) -> Any:
            return function(**arguments)

        began, on_gpu = perf_counter(), self.device.type == "cuda"
        # torch caches compiled functions by code object, so each gets its own
        code = step.__code__.replace(co_name=f"step_{next(COUNT)}")
        step = FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)
        if on_gpu:  # on a CPU, tensors marked as static would become constants like weights
            for tensor in static:
                torch._dynamo.mark_static_address(tensor)
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        if BACKEND == "inductor":
            graphs = torch._inductor.list_mode_options("reduce-overhead")
            options |= graphs if on_gpu else CPU_OPTIONS
        compiled = torch.compile(
            step, dynamic=False, fullgraph=True, backend=BACKEND, options=options
        )
        # in the options of torch.compile, freezing comes too late for the tracing
        freezing = torch._inductor.config.patch(freezing=not on_gpu)
        try:
            with freezing, warnings.catch_warnings(action="ignore", category=UserWarning):
                for _ in range(3 if on_gpu else 1):  # on a GPU, one warms up, one is recorded
                    compiled(**arguments)
        except Exception as error:  # torch.compile and C++ compilers may raise anything
            self.failed = True
            inner = getattr(error, "inner_exception", error)
            say(f"calls run uncompiled from here on: {first_line(inner)}")
            return function
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
        last = max(request.state.row for request in requests)
        tokens = next((size for size in TOKENS if size >= new), None)
        rows = next((size for size in BATCHES if size > last), None)
        if self.graphs.failed or tokens is None or rows is None or not cache.is_ready:
            return None
        cache.reserve_columns(max(request.state.cached for request in requests) + new + 1)
        if rows > cache.placement.capacity[0]:
            return None
        source = 0
        if self.body.cross_attends:
            lengths = {len(request.state.encoded) for request in requests}
            source = max(lengths) if first else cache.source_capacity
            if self.body.masks_sources:
                source = source_bucket(max(source, cache.source_capacity))
                cache.reserve_sources(source)
            elif lengths != {source}:
                return None
        return Bucket(rows, tokens, cache.placement.capacity[1], source)

    def __call__(self, call: ForwardBatch, bucket: Bucket) -> BatchOutput:
        """Runs a call in the shape of a bucket, inside `Body.prepared`."""
        cache, layers = call.cache, call.layers  # the graph keeps no tensors of `call` alive

        def compute(**arguments: Any) -> BatchOutput:
            return self.body.compute(ForwardBatch(cache=cache, layers=layers, **arguments))

        given = {name: value for name, value in vars(call).items() if value is not None}
        arguments = {
            name: value for name, value in given.items() if name not in ("cache", "layers")
        }
        name = "calls" if call.encoded is None else "first calls"
        name += f" of {bucket.rows} x {bucket.tokens} tokens over {bucket.columns} columns"
        key = (bucket, tuple(layers), tuple(arguments))
        return self.graphs.run(key, compute, arguments, name, cached_tensors(cache))


def source_bucket(length: int) -> int:
    """Rounds a source length up to its bucket."""
    return max(SOURCES, 1 << (length - 1).bit_length())


def say(message: str) -> None:
    """Prints a status line to stderr."""
    print(f"compile: {message}", file=sys.stderr, flush=True)
