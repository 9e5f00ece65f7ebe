"""Products of a few rows with large weights, which is what a round of decoding is made of.

On a CPU in float32 two layouts of a matrix are used. A row or two is read fastest from weights that
lie along their longer side (`models/layout.py`); from three rows on oneDNN's packed layout is up to
three times as fast as a plain product (benchmarks/few_rows.py). It is a copy, made when it is first
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 2
"""Rows up to which the plain product is the fastest."""
LARGE = 2**16
"""Least numbers of a matrix that is packed."""
PACKED_FOR = 8
"""Rows that the packed layout is made for; others can be multiplied with it too."""
CAN_PACK = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear:
    """x W^T + b for one matrix, or for several of the same input side by side.

    Shapes: weight [out, in], bias [out] or None.
    """

    __slots__ = ("bias", "more", "packed", "packs", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.more: tuple[Linear, ...] = ()
        self.packed: Tensor | None = None
        """The matrix as oneDNN has it, once it was needed."""
        plain = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.packs = CAN_PACK and plain and weight.numel() >= LARGE

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
        if not self.packs or x.numel() <= FEW * x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        if self.packed is None:
            rows = self.weight.contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(rows, PACKED_FOR)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


@dataclass(frozen=True)
class Forked:
    """Products with one matrix or with another, as each row wants. Of a few rows reading the
    weights is what takes the time, so all rows are multiplied with both, and one is taken."""

    both: Linear
    """Side by side."""

    @property
    def width(self) -> int:
        """Numbers that it gives."""
        return self.both.width // 2

    @property
    def dtype(self) -> torch.dtype:
        return self.both.dtype

    def choose(self, x: Tensor, second: Tensor) -> Tensor:
        """Shapes: x [B, N, in], second [B, N, 1] true where the second matrix is wanted -> [B, N,
        out]."""
        of_first, of_second = self.both(x).chunk(2, dim=-1)
        return torch.where(second, of_second, of_first)


Product = Linear | Forked


def multiply(product: Product, x: Tensor, slots: Tensor | None) -> Tensor:
    """A product of rows, those of masked slots with weights of their own where there are such.

    Shapes: x [B, N, in], slots [B, N, 1] -> [B, N, out].
    """
    if isinstance(product, Linear):
        return product(x)
    assert slots is not None, "which rows are slots is not said"
    return product.choose(x, slots)
