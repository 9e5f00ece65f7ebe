"""The matrix products that a piece of training is made of, and how fast they run alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
FACTORS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.addmm_.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
"""Which arguments of each operation are multiplied with each other."""


@dataclass(frozen=True)
class Product:
    """A product of two matrices (or of two batches of them) as it was asked for."""

    left: tuple[int, ...]
    left_stride: tuple[int, ...]
    right: tuple[int, ...]
    right_stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def flops(self) -> int:
        """A multiplication and an addition each."""
        *batch, rows, inner = self.left
        return 2 * rows * inner * self.right[-1] * (batch[0] if batch else 1)

    def touches(self, size: int) -> bool:
        """Whether one of its sides has this size (the vocabulary's, say)."""
        return size in (*self.left[-2:], self.right[-1])

    def factors(self) -> tuple[Tensor, Tensor]:
        """Random matrices of these sizes, laid out in memory as these were."""
        made = []
        for size, stride in ((self.left, self.left_stride), (self.right, self.right_stride)):
            empty = torch.empty_strided(size, stride, dtype=self.dtype, device=self.device)
            made.append(empty.normal_())
        return made[0], made[1]


@dataclass
class ProductCounter(TorchDispatchMode):
    """While entered, counts the products that are computed, those of gradients included."""

    counts: Counter[Product] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if (places := FACTORS.get(function)) is not None:
            left, right = (arguments[place] for place in places)
            product = Product(
                tuple(left.shape),
                left.stride(),
                tuple(right.shape),
                right.stride(),
                left.dtype,
                left.device,
            )
            self.counts[product] += 1
        return function(*arguments, **(keywords or {}))

    @property
    def flops(self) -> int:
        return sum(count * product.flops for product, count in self.counts.items())


def seconds_alone(
    counts: Counter[Product], clock: Callable[[], float], repeats: int = 3
) -> dict[Product, float]:
    """Seconds of each product by itself: the median of `repeats`, after one to warm up."""
    found = {}
    for product in counts:
        left, right = product.factors()
        multiply = torch.mm if left.ndim == 2 else torch.bmm
        times = []
        for _ in range(repeats + 1):
            started = clock()
            multiply(left, right)
            times.append(clock() - started)
        found[product] = sorted(times[1:])[repeats // 2]
    return found
