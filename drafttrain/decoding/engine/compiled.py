"""Calls of one sequence, compiled by torch: a few large pieces of work for many small operations.

A call of a small model on a CPU is hundreds of operations, and starting them takes a good part of
its time. Compiled, what lies between two products becomes one piece, and weights are constants.
Each decoder has two kinds of calls that are compiled: of one row, which is plain decoding and
drafting token by token, and of a few, which is what verifies a draft. Both are compiled for any
length of history and source, before anything is timed. Longer calls and those of several sequences
run as they are: compiled, they were slower (docs/results.md).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.config.commands import Compile
from drafttrain.decoding.engine.pool import Line, Pool
from drafttrain.decoding.engine.products import Linear
from drafttrain.decoding.engine.stack import FEW_ROWS, Memory, Rotations, Rows, Stack, run_stack
from drafttrain.decoding.inference import without_gradients

Kind = Literal["one row", "few rows"]

ROWS: dict[Kind, int] = {"one row": 1, "few rows": 6}
"""Rows of the call that each kind is compiled and timed with."""
HISTORY, SOURCE = 41, 17
"""Tokens before it, and of its source."""
OPTIONS: dict[str, Any] = {
    "freezing": True,
    "cpp_wrapper": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "max_autotune_report_choices_stats": False,
    "autotune_num_choices_displayed": 0,
}
"""Of inductor on a CPU: weights are constants, no Python runs between the pieces, and each product
is the fastest, here, of a library's and of loops that are written for its shape."""
CUDA_GRAPHS = "reduce-overhead"
"""torch's mode for a GPU."""
BACKEND = "inductor"
PAYS = 0.95
"""auto: least share of the eager time at which compiled calls are left as they are."""
BLOCKS, CALLS = 9, 20
"""How often each is timed, in turn; a median is taken of the blocks."""

Step = Callable[..., tuple[Tensor, ...]]


class Engine(Protocol):
    """What decodes a model's calls."""

    @property
    def stack(self) -> Stack | None:
        """None: the family is not known, and nothing of it can be compiled."""

    def compile(self, how: Compile) -> str:
        """Compile what it calls; a line that says what came of it."""


_ENGINES: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
"""All there are in this process, by when they were made."""
_COUNT = itertools.count()


def enlist(engine: Engine) -> None:
    """Have an engine that has just been made compiled with the others."""
    _ENGINES[next(_COUNT)] = engine


def compile_calls(how: Compile, most: int = 1) -> None:
    """Compile the calls of all decoders that there are; a line on standard error says of each what
    came of it.

    auto: where they are not faster than eager ones, those stay. What cannot be compiled runs as it
    is, and the line says why. most: sequences that are decoded at once.
    """
    if how == "off":
        return
    reason = None
    if most > 1:
        reason = f"calls of several sequences (batch_size {most}) are not compiled"
    elif any(engine.stack is not None and on_cpu(engine.stack) for engine in _ENGINES.values()):
        reason = missing_compiler()
    if reason is not None:
        _say(f"{reason}; all calls run uncompiled")
        return
    for engine in list(_ENGINES.values()):
        _say(engine.compile(how))


def _say(what: str) -> None:
    print(f"compile: {what}", file=sys.stderr, flush=True)


def on_cpu(stack: Stack) -> bool:
    return stack.device.type == "cpu"


def missing_compiler() -> str | None:
    """Why no C++ can be compiled here; None: it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # inductor's own, of a module that is not public
        return f"{_first_line(error)} (install g++, or name a compiler in CXX)"
    return None


class CompiledStep:
    """`run_stack` for the only line of a pool: one row, or a few."""

    def __init__(
        self, stack: Stack, rotations: Rotations | None, limit: int | None, embeds: bool
    ) -> None:
        """limit: positions that there are. embeds: calls are given embedded tokens."""
        self._stack, self._rotations, self._embeds = stack, rotations, embeds
        self._positions = HISTORY + FEW_ROWS if limit is None else limit
        attention = stack.layers[0].attention
        self._most = FEW_ROWS * attention.kv_heads // attention.heads
        self._number = next(_COUNT)
        self._kinds: dict[Kind, Step] = {}

    def __call__(
        self,
        rows: Rows,
        pool: Pool,
        rotations: Rotations | None,
        embedded: Tensor | None,
        kept: dict[int, Tensor | None],
    ) -> Tensor | None:
        """Hidden states, as of `run_stack`; None: such a call is not compiled."""
        kind = self._kind_of(rows, pool)
        if kind is None or kind not in self._kinds:
            return None
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                given = _given(rows, pool, rotations, embedded)
                found = self._kinds[kind](self._which(kind), *given)
                written, hidden, *of_layers = found
        except Exception as error:  # whatever torch.compile comes upon
            del self._kinds[kind]
            _say(f"calls of {kind} run uncompiled from here on: {_first_line(error)}")
            return None
        pool.states[:, :, :, rows.columns] = written
        for number in kept:
            kept[number] = of_layers[number]
        return hidden

    def _kind_of(self, rows: Rows, pool: Pool) -> Kind | None:
        """Sizes of nought and one are left out: torch compiles them apart from others."""
        assert isinstance(rows.columns, slice)
        if pool.states.shape[1] != 1 or rows.columns.start < 2 or pool.lengths[0] == 1:
            return None
        new = rows.ids.shape[1]
        if new == 1:
            return "one row"
        return "few rows" if new <= self._most else None

    def _which(self, kind: Kind) -> str:
        return f"{self._number} {kind}"

    def prepare(self, how: Compile) -> str:
        """Compile both kinds; with `auto`, keep those that pay. What came of it, in words."""
        stack, began = self._stack, perf_counter()
        module, kept = _Step(stack), []
        for kind, new in ROWS.items():
            compiled = _compile(module, stack)
            try:
                with _settings(stack):
                    compiled(self._which(kind), *_given(*self._made_up(new)))
            except Exception as error:  # whatever torch.compile, or a C++ compiler, comes upon
                self._kinds.clear()
                return f"{_title(stack)}, runs uncompiled: {_first_line(error)}"
            self._kinds[kind] = compiled
            if how == "auto":
                share = self.share(new)
                if share > PAYS:
                    del self._kinds[kind]
                outcome = "compiled" if kind in self._kinds else "left as they are"
                kept.append(f"calls of {kind} {outcome} ({share:.2f} of the time)")
        outcome = "; ".join(kept) or "compiled"
        return f"{_title(stack)}: {outcome}; {perf_counter() - began:.0f} s"

    @without_gradients
    def share(self, new: int, now: Callable[[], float] = perf_counter) -> float:
        """What compiled calls of so many rows take of the eager time, by this clock."""
        rows, pool, rotations, embedded = self._made_up(new)
        places = slice(HISTORY, HISTORY + new)

        def eagerly() -> None:
            cache = pool.columns(slice(0, 1), places.stop)
            memory = pool.memory(slice(0, 1), [0])
            run_stack(self._stack, rows, cache, rotations, memory, embedded)

        return time_share(lambda: self(rows, pool, rotations, embedded, {}), eagerly, now)

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
        rows = Rows(ids, positions, slice(HISTORY, total), mask, keys)
        embedded = stack.embed(ids, positions) if self._embeds else None
        return rows, pool, self._rotations, embedded


def time_share(
    compiled: Callable[[], Any], eager: Callable[[], Any], now: Callable[[], float] = perf_counter
) -> float:
    """Time of the one over that of the other: medians of short blocks, in turn."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + BLOCKS):
        for call, seconds in zip((compiled, eager), taken, strict=True):
            began = now()
            for _ in range(CALLS):
                call()
            seconds.append(now() - began)
    return statistics.median(taken[0][1:]) / statistics.median(taken[1][1:])


def _given(
    rows: Rows, pool: Pool, rotations: Rotations | None, embedded: Tensor | None
) -> tuple[Any, ...]:
    """What `_Step` is called with: tensors laid out alike, whatever the call."""
    assert isinstance(rows.columns, slice)
    mask = rows.mask
    if mask is None:  # a single token sees all
        mask = torch.ones(1, 1, 1, rows.columns.stop, dtype=torch.bool, device=rows.ids.device)
    keys = None if rows.key_positions is None else rows.key_positions[0]
    length = pool.lengths[0] if len(pool.sources) else None
    rotary = None if rotations is None else (rotations.cos, rotations.sin)
    layout = (rows.ids[0], rows.positions[0], mask[0, 0].contiguous(), keys)
    return (*layout, pool.states, pool.sources, length, rotary, embedded)


@contextmanager
def _settings(stack: Stack) -> Iterator[None]:
    """Of torch's compiler: sizes that happen to be equal are not taken for one, and many decoders
    may be compiled. A warning about torch's own use of itself is kept quiet."""
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),
        torch.fx.experimental._config.patch(use_duck_shape=False),
        torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True),
        torch._inductor.config.patch(OPTIONS if on_cpu(stack) else {}),
    ):
        yield


def _compile(module: nn.Module, stack: Stack) -> Step:
    options: dict[str, Any] = {"guard_filter_fn": _of_arguments}
    if BACKEND == "inductor":
        options |= OPTIONS if on_cpu(stack) else torch._inductor.list_mode_options(CUDA_GRAPHS)
    return torch.compile(module, dynamic=True, fullgraph=True, backend=BACKEND, options=options)


def _of_arguments(guards: Sequence[Any]) -> list[bool]:
    """What torch looks at in each call: the arguments; the weights stay what they are."""
    return [not guard.is_global and "self" not in guard.name for guard in guards]


class _Step(nn.Module):
    """A stack whose tensors are parameters of a module, which is what can be made constant."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self._weights = nn.ParameterList()
        self._rebuild = self._take_apart(stack)
        self.eval()

    def _take_apart(self, part: Any) -> Callable[[], Any]:
        """A function that puts the part together again, from this module's parameters."""
        if isinstance(part, Tensor):
            number = len(self._weights)
            self._weights.append(nn.Parameter(part, requires_grad=False))
            return lambda: self._weights[number]
        if isinstance(part, Linear):
            weight, bias = self._take_apart(part.weight), self._take_apart(part.bias)
            more = [self._take_apart(one) for one in part.more]
            return lambda: _plain(weight(), bias(), [one() for one in more])
        if dataclasses.is_dataclass(part):
            kind, fields = type(part), dataclasses.fields(part)
            makers = {field.name: self._take_apart(getattr(part, field.name)) for field in fields}
            return lambda: kind(**{name: make() for name, make in makers.items()})
        if isinstance(part, list):
            parts = [self._take_apart(one) for one in part]
            return lambda: [make() for make in parts]
        return lambda: part

    def forward(
        self,
        which: str,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        key_positions: Tensor | None,
        states: Tensor,
        sources: Tensor,
        length: int | None,
        rotary: tuple[Tensor, Tensor] | None,
        embedded: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """New columns of the cache [2 L, 1, heads, N, head_dim], hidden states, and the outputs of
        all layers.

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
        rows = Rows(ids[None], positions[None], columns, mask[None, None], keys)
        stack = self._rebuild()
        kept: dict[int, Tensor | None] = dict.fromkeys(range(len(stack.layers)))
        rotations = None if rotary is None else Rotations(*rotary)
        hidden = run_stack(stack, rows, cache, rotations, memory, embedded, kept)
        written = torch.stack([one[:, :, total - new :] for one in grown])
        return (written, hidden, *kept.values())


def _plain(weight: Tensor, bias: Tensor | None, more: Sequence[Linear]) -> Linear:
    """A product that is left to the compiler."""
    product = Linear(weight, bias)
    product.packs, product.more = False, tuple(more)
    return product


def _title(stack: Stack) -> str:
    return f"decoder of {len(stack.layers)} layers, width {stack.embedding.shape[1]}"


def _first_line(error: Exception) -> str:
    """What went wrong, without what torch's compiler wraps it in."""
    inner = getattr(error, "inner_exception", error)
    return (str(inner).strip() or type(inner).__name__).splitlines()[0]
