"""Calls of one sequence, compiled by torch: a few large pieces of work for many small operations.

What a call of a small model costs on a CPU is hundreds of operations more than their arithmetic.
Compiled, the products of a few rows stay as they are (oneDNN's, packed), and what lies between them
becomes one piece. It takes a C++ compiler and about a minute at first use; torch keeps the code for
later runs. Calls of several sequences are not compiled: they were slower so (docs/results.md).
"""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drafttrain.decoding.engine.products import Linear
from drafttrain.decoding.engine.stack import Memory, Rotations, Rows, Stack, run_stack

How = Literal["off", "auto", "on"]

SMALL = 2**23
"""Numbers of a decoder's weights up to which operations, not products, are most of its time."""
BACKEND = "inductor"
OPTIONS = {"freezing": True, "cpp_wrapper": True}
"""Of inductor: weights are constants, which it packs; no Python between the pieces."""

_how: How = "off"


def compile_calls(how: How) -> None:
    """Whether decoders that are read from now on are compiled, in this process."""
    global _how
    _how = how


def compiled_step(stack: Stack) -> CompiledStep | None:
    """The stack's calls of one sequence, compiled when they are first made; None: they are not."""
    if _how == "off" or (_how == "auto" and not _pays(stack)):
        return None
    return CompiledStep(stack)


def _pays(stack: Stack) -> bool:
    """Where compiled calls were measured to be faster: small decoders on a CPU, in float32."""
    numbers = sum(tensor.numel() for tensor in _tensors(stack))
    on_cpu = stack.device.type == "cpu" and stack.dtype == torch.float32
    return on_cpu and numbers <= SMALL and shutil.which("g++") is not None


class CompiledStep:
    """`run_stack` for one sequence. What cannot be compiled runs as it is, after one warning."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._module = _Step(stack)
        self._compiled: Callable[..., tuple[Tensor, ...]] | None = None
        self._failed = False

    def __call__(
        self,
        rows: Rows,
        states: Tensor,
        rotations: Rotations | None,
        memory: Memory | None,
        embedded: Tensor | None,
        kept: dict[int, Tensor | None],
    ) -> Tensor | None:
        """Hidden states, as of `run_stack`; None: it cannot be compiled.

        Shapes: states [2 L, heads, C, head_dim], the sequence's line of the pool.
        """
        if self._failed:
            return None
        if self._compiled is None:
            self._compiled = _compile(self._module)
        assert isinstance(rows.columns, slice)
        sources = [] if memory is None else [part for both in memory.keys_values for part in both]
        rotary = None if rotations is None else (rotations.cos, rotations.sin)
        given = (rows.ids, rows.positions, rows.columns.start, rows.mask, rows.key_positions)
        try:
            found = self._compiled(*given, states, sources, rotary, embedded, tuple(kept))
        except Exception as error:  # whatever torch.compile, or a C++ compiler, comes upon
            self._failed = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"compile: calls run uncompiled, as torch says: {reason}", stacklevel=2)
            return None
        hidden, *of_layers = found
        kept.update(zip(kept, of_layers, strict=True))
        return hidden


def _compile(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    if BACKEND != "inductor":
        return torch.compile(module, dynamic=True, backend=BACKEND)
    on_cpu = next(module.parameters()).device.type == "cpu"
    return torch.compile(module, dynamic=True, options=OPTIONS if on_cpu else None)


class _Step(nn.Module):
    """A stack whose tensors are parameters of a module, which is what can be frozen."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self._weights = nn.ParameterList()
        self._rebuild = self._take_apart(stack)

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
        ids: Tensor,
        positions: Tensor,
        start: int,
        mask: Tensor | None,
        key_positions: Tensor | None,
        states: Tensor,
        sources: Sequence[Tensor],
        rotary: tuple[Tensor, Tensor] | None,
        embedded: Tensor | None,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        end = start + ids.shape[1]
        found = states[:, None, :, :end].unbind()
        cache = list(zip(found[::2], found[1::2], strict=True))
        memory = Memory(list(zip(sources[::2], sources[1::2], strict=True)), None)
        rows = Rows(ids, positions, slice(start, end), mask, key_positions)
        kept: dict[int, Tensor | None] = dict.fromkeys(layers)
        rotations = None if rotary is None else Rotations(*rotary)
        hidden = run_stack(
            self._rebuild(), rows, cache, rotations, memory if sources else None, embedded, kept
        )
        return (hidden, *kept.values())


def _plain(weight: Tensor, bias: Tensor | None, more: Sequence[Linear]) -> Linear:
    """A product that is left to the compiler."""
    product = Linear(weight, bias)
    product.packs, product.more = False, tuple(more)
    return product


def _tensors(part: Any) -> list[Tensor]:
    """All weights of a stack."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, Linear):
        return [part.weight, *_tensors(part.more)]
    if dataclasses.is_dataclass(part):
        part = [getattr(part, field.name) for field in dataclasses.fields(part)]
    parts = part if isinstance(part, (list, tuple)) else ()
    return [tensor for one in parts for tensor in _tensors(one)]
