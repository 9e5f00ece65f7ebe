"""How parts of the engine are compiled by torch: asked for, settled, tried and told.

What can be compiled enlists itself when it is made: decoders, with their calls of one sequence, and
encoders of texts. A command asks for all of them at once, before anything is timed.
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
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafttrain.config.commands import Compile
from drafttrain.decoding.engine.products import Linear
from drafttrain.decoding.engine.stack import Stack
from drafttrain.decoding.inference import without_gradients

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

Step = Callable[..., Any]
Share = Callable[[], float]


class Compilable(Protocol):
    """What makes a model's calls, or some of them."""

    @property
    def stack(self) -> Stack | None:
        """None: the family is not known, and nothing of it can be compiled."""

    def compile(self, how: Compile) -> str:
        """Compile what it calls; a line that says what came of it."""


ENLISTED: weakref.WeakValueDictionary[int, Compilable] = weakref.WeakValueDictionary()
"""All there are in this process, by when they were made."""
COUNT = itertools.count()


def enlist(part: Compilable) -> None:
    """Have what has just been made compiled with the others."""
    ENLISTED[next(COUNT)] = part


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
    elif any(engine.stack is not None and on_cpu(engine.stack) for engine in ENLISTED.values()):
        reason = missing_compiler()
    if reason is not None:
        say(f"{reason}; all calls run uncompiled")
        return
    parts = list(ENLISTED.values())
    if known := sum(part.stack is not None for part in parts):
        say(f"encoders and decoders to compile: {known}; each takes a minute or two")
    for part in parts:
        say(part.compile(how))


def say(what: str) -> None:
    print(f"compile: {what}", file=sys.stderr, flush=True)


def on_cpu(stack: Stack) -> bool:
    return stack.device.type == "cpu"


def missing_compiler() -> str | None:
    """Why no C++ can be compiled here; None: it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # inductor's own, of a module that is not public
        return f"{first_line(error)} (install g++, or name a compiler in CXX)"
    return None


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


@contextmanager
def compiler_settings(stack: Stack) -> Iterator[None]:
    """Of torch's compiler: sizes that happen to be equal are not taken for one, and many decoders
    may be compiled. A warning about torch's own use of itself is kept quiet."""
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),
        torch.fx.experimental._config.patch(use_duck_shape=False),
        torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True),
        torch._inductor.config.patch(OPTIONS if on_cpu(stack) else {}),
    ):
        yield


def compile_module(module: nn.Module, stack: Stack) -> Step:
    options: dict[str, Any] = {"guard_filter_fn": _of_arguments}
    if BACKEND == "inductor":
        options |= OPTIONS if on_cpu(stack) else torch._inductor.list_mode_options(CUDA_GRAPHS)
    return torch.compile(module, dynamic=True, fullgraph=True, backend=BACKEND, options=options)


def _of_arguments(guards: Sequence[Any]) -> list[bool]:
    """What torch looks at in each call: the arguments; the weights stay what they are."""
    return [not guard.is_global and "self" not in guard.name for guard in guards]


class CompiledCalls:
    """Calls of one kind, compiled for tensors of any size; `__call__` gives None where that does
    not work, or not any more."""

    def __init__(self, module: nn.Module, stack: Stack, words: str) -> None:
        self.words, self.which = words, f"{next(COUNT)} {words}"
        """What messages call them; a name of their own, by which torch finds them again."""
        self._stack = stack
        self._step: Step | None = compile_module(module, stack)

    def begin(self, given: Sequence[Any]) -> None:
        """Compile, by a call with tensors made up. Raises whatever torch.compile raises."""
        assert self._step is not None
        with compiler_settings(self._stack):
            self._step(self.which, *given)

    def __call__(self, given: Sequence[Any]) -> Any:
        if self._step is None:
            return None
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._step(self.which, *given)
        except Exception as error:  # whatever torch.compile comes upon
            self._step = None
            say(f"{self.words} run uncompiled from here on: {first_line(error)}")
            return None

    def keep_if_faster(self, share: float) -> str:
        """Run them uncompiled where that takes hardly longer; what came of it, in words."""
        outcome = "compiled"
        if share > PAYS:
            self._step, outcome = None, "left as they are"
        return f"{self.words} {outcome} ({share:.2f} of the time)"


@without_gradients
def prepare(
    how: Compile, stack: Stack, kinds: Sequence[tuple[CompiledCalls, Sequence[Any], Share]]
) -> tuple[bool, str]:
    """Compile all kinds of a part's calls; with `auto`, keep those that pay.

    Of each kind the calls, tensors made up for one, and what it takes of the eager time. Whether
    all could be compiled, and what came of it in words.
    """
    began, kept = perf_counter(), []
    for calls, given, share in kinds:
        try:
            calls.begin(given)
        except Exception as error:  # whatever torch.compile, or a C++ compiler, comes upon
            return False, f"{title(stack)}, runs uncompiled: {first_line(error)}"
        if how == "auto":
            kept.append(calls.keep_if_faster(share()))
    outcome = "; ".join(kept) or "compiled"
    return True, f"{title(stack)}: {outcome}; {perf_counter() - began:.0f} s"


class StackModule(nn.Module):
    """A stack whose tensors are parameters of a module, which is what can be made constant."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self._weights = nn.ParameterList()
        self.rebuild = self._take_apart(stack)
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


def _plain(weight: Tensor, bias: Tensor | None, more: Sequence[Linear]) -> Linear:
    """A product that is left to the compiler."""
    product = Linear(weight, bias)
    product.packs, product.more = False, tuple(more)
    return product


def title(stack: Stack) -> str:
    part = "encoder" if stack.output is None else "decoder"
    return f"{part} of {len(stack.layers)} layers, width {stack.embedding.shape[1]}"


def first_line(error: Exception) -> str:
    """What went wrong, without what torch's compiler wraps it in."""
    inner = getattr(error, "inner_exception", error)
    return (str(inner).strip() or type(inner).__name__).splitlines()[0]
