"""Products of a few rows with large weights, which is what a round of decoding is made of.

On a CPU three ways of making them are known: with the matrix as it lies (`models/layout.py`), with
a copy in oneDNN's packed layout, and with that copy and rows repeated until there are
`REPEATED_TO`, as on some processors its kernels for one or two rows read weights from memory more
slowly than those for four do. Which is the fastest for how many rows depends on the processor, the
type, the matrix and the size of its model, so they are timed once for each size, with the weights
of the model itself, when it is read. The copy is made when it is first needed.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TIMED = (1, 2, 4, 8, 16)
"""Rows that the ways are timed with."""
REPEATED_TO = 4
"""Least rows that fewer are repeated to."""
TIMINGS = 5
"""Of every way with each matrix; the median counts, over all matrices of a size."""
TIMED_BYTES = 2**25
"""Matrices that are timed of one model, in the order in which it multiplies with them; of any
further size, one. That so many are gone through in turn leaves weights where they are in decoding:
in the processor's caches only if the model is small enough to stay there."""
LARGE = 2**16
"""Least numbers of a matrix that is packed."""
PACKED_FOR = 8
"""Rows that the packed layout is made for; others can be multiplied with it too."""
PACKED_TYPES = frozenset(
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
)
"""What is packed on this machine's CPU. Asked once: traced code cannot ask."""


Size = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a matrix."""


class Linear:
    """x W^T + b for one matrix, or for several of the same input side by side.

    Shapes: weight [out, in], bias [out] or None.
    """

    __slots__ = ("bias", "more", "packed", "packs", "ways", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.more: tuple[Linear, ...] = ()
        self.packed: Tensor | None = None
        """The matrix as oneDNN has it, once it was needed."""
        self.ways: Ways | None = None
        """What is fastest for how many rows, once that is known."""
        large = weight.device.type == "cpu" and weight.numel() >= LARGE
        self.packs = large and weight.dtype in PACKED_TYPES

    @staticmethod
    def side_by_side(parts: Sequence[Linear]) -> Linear:
        """The outputs of all parts, one behind the other."""
        first, *more = parts
        joined = Linear(first.weight, first.bias)
        joined.more = tuple(more)
        return joined

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def size(self) -> Size:
        return tuple(self.weight.shape), self.weight.stride(), self.weight.dtype

    @property
    def width(self) -> int:
        """Numbers that it gives."""
        return self.weight.shape[0] + sum(part.width for part in self.more)

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [..., N, in] -> [..., N, out]."""
        if self.more:
            return torch.cat([self._own(x), *(part(x) for part in self.more)], -1)
        return self._own(x)

    def _own(self, x: Tensor) -> Tensor:
        if not self.packs:
            return F.linear(x, self.weight, self.bias)
        if self.ways is None:
            choose_ways(self)
        rows = x.numel() // x.shape[-1]
        if rows <= self.ways.plain:
            return F.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = pack(self.weight)
        multiply_by = by_repeated if rows in self.ways.repeated else by_packed
        return multiply_by(x, self.packed, self.bias)


def pack(weight: Tensor) -> Tensor:
    """A copy in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)


def by_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def by_repeated(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """The same of fewer rows than `REPEATED_TO`, made with each of them several times."""
    times = -(-REPEATED_TO * x.shape[-1] // x.numel())
    return by_packed(torch.cat((x,) * times), packed, bias)[: len(x)]


@dataclass(frozen=True)
class Ways:
    """How products of how many rows with a matrix are made the fastest."""

    plain: int
    """Rows up to which the matrix is taken as it lies; with any more it is packed."""
    repeated: frozenset[int] = frozenset()
    """Numbers of rows that are repeated where it is packed."""


def choose_ways(part: Any) -> None:
    """Let the products of a model, or of a part of one, be made in the ways that are fastest here.

    Timed once in a process for all models with matrices of the same sizes, and once for each number
    of threads.
    """
    products = [one for one in products_of(part) if one.packs]
    alike = tuple(one.size for one in products), torch.get_num_threads()
    if alike not in _CHOSEN:
        _CHOSEN[alike] = _timed(products)
    for one in products:
        one.ways = _CHOSEN[alike][one.size]


_CHOSEN: dict[Any, dict[Size, Ways]] = {}


def products_of(part: Any) -> Iterator[Linear]:
    """All products of a model, or of a part of one, in the order of their use."""
    if isinstance(part, Linear):
        yield part
        yield from part.more
    elif isinstance(part, list):
        for one in part:
            yield from products_of(one)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from products_of(getattr(part, field.name))


@torch.no_grad()
def _timed(products: Sequence[Linear]) -> dict[Size, Ways]:
    """What is fastest for each size. Those that were packed for it stay so where that is of use."""
    timed: list[tuple[Linear, Tensor]] = []
    sizes, room = set(), TIMED_BYTES
    for one in products:
        if room > 0 or one.size not in sizes:
            timed.append((one, pack(one.weight) if one.packed is None else one.packed))
            sizes.add(one.size)
            room -= one.weight.nbytes
    found: dict[Size, dict[int, list[float]]] = {size: {} for size in sizes}
    states, scores = torch.ones(4, 256), torch.ones(4, 8, 64)
    for rows in TIMED:
        ways = range(3 if rows < REPEATED_TO else 2)
        seconds = defaultdict(list)
        for way in [*ways] * TIMINGS:
            for one, packed in timed:
                _between_products(states, scores)
                seconds[one.size, way].append(_seconds(one, packed, rows, way))
        for size in sizes:
            found[size][rows] = [median(seconds[size, way]) for way in ways]
    chosen = {size: fastest(of_size) for size, of_size in found.items()}
    for one, packed in timed:
        if chosen[one.size].plain < TIMED[-1]:
            one.packed = packed
    return chosen


def _between_products(states: Tensor, scores: Tensor) -> None:
    """Such small operations as a layer has between two products. Where they are left out a product
    finds its code in caches that in decoding hold other code, and a packed one takes 20
    microseconds less than it does there."""
    first, second = F.rms_norm(states, states.shape[-1:]).chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1) * states + states
    mixed = torch.bmm(scores.softmax(-1), scores.transpose(1, 2))
    _ = F.silu(turned) * states, mixed.transpose(0, 1).reshape(len(scores), -1)


def _seconds(product: Linear, packed: Tensor, rows: int, way: int) -> float:
    x = product.weight.new_ones(rows, product.weight.shape[1])
    began = perf_counter()
    if way == 0:
        F.linear(x, product.weight, product.bias)
    else:
        (by_packed, by_repeated)[way - 1](x, packed, product.bias)
    return perf_counter() - began


def fastest(seconds: Mapping[int, Sequence[float]]) -> Ways:
    """The ways of least seconds.

    The matrix is taken as it lies up to the last number of rows before the first for which that is
    no faster. seconds: by rows, rising, of products with the matrix as it lies, packed, and, where
    that was timed, packed with rows repeated.
    """
    plain = 0
    for rows, (as_it_lies, *others) in seconds.items():
        if min(others) <= as_it_lies:
            break
        plain = rows
    repeated = frozenset(
        rows for rows, (_, packed, *more) in seconds.items() if min(more, default=packed) < packed
    )
    return Ways(plain, repeated)


@dataclass(frozen=True)
class Forked:
    """Products of tokens' rows with one matrix, and of masked slots' with another."""

    tokens: Linear
    slots: Linear

    @property
    def width(self) -> int:
        """Numbers that it gives."""
        return self.tokens.width

    @property
    def dtype(self) -> torch.dtype:
        return self.tokens.dtype

    def choose(self, x: Tensor, slots: Tensor | int) -> Tensor:
        """Shapes: x [B, N, in]; slots [B, N, 1] true where a row is a slot's, or, where all behind
        some row are, and no other, its number -> [B, N, out]."""
        if isinstance(slots, Tensor):
            return torch.where(slots, self.slots(x), self.tokens(x))
        if slots == 0:
            return self.slots(x)
        if slots == x.shape[1]:
            return self.tokens(x)
        return torch.cat((self.tokens(x[:, :slots]), self.slots(x[:, slots:])), dim=1)


Product = Linear | Forked


def one_side(part: Any, slots: bool) -> Any:
    """The same layers, dataclasses and lists of them, whose forked products are those of slots
    alone, or of tokens alone."""
    if isinstance(part, Forked):
        return part.slots if slots else part.tokens
    if isinstance(part, list):
        return [one_side(one, slots) for one in part]
    if dataclasses.is_dataclass(part):
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        changed = {name: one_side(value, slots) for name, value in values.items()}
        return dataclasses.replace(part, **changed)
    return part


def multiply(product: Product, x: Tensor, slots: Tensor | int | None) -> Tensor:
    """A product of rows, those of masked slots with weights of their own where there are such.

    slots: as of `Forked.choose`. Shapes: x [B, N, in] -> [B, N, out].
    """
    if isinstance(product, Linear):
        return product(x)
    assert slots is not None, "which rows are slots is not said"
    return product.choose(x, slots)


def which_are_slots(ids: Tensor, mask_id: int | None, embedded: int) -> Tensor | int | None:
    """What `Forked.choose` is told, by the tokens that are fed; None: no row has others.

    embedded: rows of the embedding; tokens that stand in slots are counted on from there.
    On a CPU the rows of one sequence, whose slots stand behind its tokens, are multiplied apart.
    Compiled calls cannot be, as their shapes would follow from what they are fed. Shapes: [B, N].
    """
    if mask_id is None:
        return None
    slots = (ids == mask_id) | (ids >= embedded)
    if len(ids) == 1 and ids.device.type == "cpu" and not torch.compiler.is_compiling():
        tokens = int((~slots).sum())
        if bool(slots[0, tokens:].all()):
            return tokens
    return slots[..., None]
