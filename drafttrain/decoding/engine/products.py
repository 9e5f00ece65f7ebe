"""Products of a few rows with large weights, which is what a round of decoding is made of.

On a CPU two layouts of a matrix are used. In float32 a row or two is read fastest from weights that
lie along their longer side (`models/layout.py`); for more rows oneDNN's packed layout is up to
three times as fast as a plain product, or slower: from how many rows on depends on the processor
and on the matrix (benchmarks/few_rows.py), so both are timed once for each size. In bfloat16, where
the processor has products of it, the packed layout is the faster one for any number of rows. It is
a copy, made when it is first needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = {torch.float32: 2, torch.bfloat16: 0}
"""Rows up to which the plain product is the fastest on every processor, of the types that are
packed."""
TIMED = {torch.float32: (4, 8, 16), torch.bfloat16: ()}
"""Rows that both are timed with, where it depends on the processor; the plain product is taken up
to the last of them, from the first on, for which it is the faster one, and never for more."""
TIMED_UP_TO = 2**22
"""Most numbers of a matrix that is timed: copies of output layers take long to make."""
TIMINGS = 5
"""Of each, in turn; the shortest counts."""
ELSEWHERE = 2**21
"""Numbers that are read before each timing, so that weights come from where they do in a model:
not from the caches nearest to the processor."""
LARGE = 2**16
"""Least numbers of a matrix that is packed."""
PACKED_FOR = 8
"""Rows that the packed layout is made for; others can be multiplied with it too."""
PACKED_TYPES = frozenset(
    dtype
    for dtype in FEW
    if torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
)
"""What is packed on this machine's CPU. Asked once: traced code cannot ask."""


class Linear:
    """x W^T + b for one matrix, or for several of the same input side by side.

    Shapes: weight [out, in], bias [out] or None.
    """

    __slots__ = ("bias", "few", "more", "packed", "packs", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.more: tuple[Linear, ...] = ()
        self.packed: Tensor | None = None
        """The matrix as oneDNN has it, once it was needed."""
        large = weight.device.type == "cpu" and weight.numel() >= LARGE
        self.packs = large and weight.dtype in PACKED_TYPES
        self.few = FEW[weight.dtype] if self.packs else 0
        """Rows up to which the plain product is taken; timed when more come for the first time."""

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
    def width(self) -> int:
        """Numbers that it gives."""
        return self.weight.shape[0] + sum(part.width for part in self.more)

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [..., in] -> [..., out]."""
        if self.more:
            return torch.cat([self._own(x), *(part(x) for part in self.more)], -1)
        return self._own(x)

    def _own(self, x: Tensor) -> Tensor:
        if not self.packs or x.numel() <= self.few * x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        if self.packed is None:
            laid_out = tuple(self.weight.shape), tuple(self.weight.stride())
            self.few = rows_of_plain(*laid_out, self.dtype, torch.get_num_threads())
            if x.numel() <= self.few * x.shape[-1]:
                return F.linear(x, self.weight, self.bias)
            self.packed = pack(self.weight)
        return by_packed(x, self.packed, self.bias)


def pack(weight: Tensor) -> Tensor:
    """A copy in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)


def by_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def rows_of_plain(
    shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype, threads: int
) -> int:
    """Rows up to which the plain product with a matrix that lies so is the faster one here, timed
    with one made up."""
    if not TIMED[dtype] or shape[0] * shape[1] > TIMED_UP_TO:
        return FEW[dtype]
    weight = torch.empty_strided(shape, strides, dtype=dtype).fill_(1)
    packed = pack(weight)
    elsewhere = torch.ones(ELSEWHERE)
    plain_seconds, packed_seconds = [], []
    for rows in TIMED[dtype]:
        x = torch.ones(rows, shape[1], dtype=dtype)
        shortest = [float("inf")] * 2
        for _ in range(TIMINGS):
            for way in range(2):
                elsewhere.sum()
                began = perf_counter()
                _ = by_packed(x, packed, None) if way else F.linear(x, weight)
                shortest[way] = min(shortest[way], perf_counter() - began)
        plain_seconds.append(shortest[0])
        packed_seconds.append(shortest[1])
    return crossover(TIMED[dtype], plain_seconds, packed_seconds, FEW[dtype])


def crossover(
    rows: Sequence[int], plain: Sequence[float], packed: Sequence[float], few: int
) -> int:
    """The last of these numbers of rows before the first for which the packed layout is no slower;
    `few` where there is none. Shapes: [N] each."""
    for count, one, other in zip(rows, plain, packed, strict=True):
        if other <= one:
            break
        few = count
    return few


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
