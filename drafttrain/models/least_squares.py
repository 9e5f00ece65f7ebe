"""Linear maps fitted to what a target does: what drafters that read its states start from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

RIDGE = 1e-2
"""What each squared weight of a fit costs, as a share of the inputs' mean square."""


@dataclass
class LeastSquares:
    """Sums from which the linear map of inputs to outputs with the least squared error follows."""

    products: Tensor
    """[I + 1, I + 1] of inputs, a constant 1 behind them."""
    wanted: Tensor
    """[I + 1, D] of inputs with outputs."""
    count: int = 0

    @staticmethod
    def empty(inputs: int, outputs: int) -> LeastSquares:
        size = inputs + 1
        return LeastSquares(torch.zeros(size, size), torch.zeros(size, outputs))

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Shapes: [N, I], [N, D]."""
        rows = F.pad(inputs.float(), (0, 1), value=1.0)
        self.products += rows.T @ rows
        self.wanted += rows.T @ outputs.float()
        self.count += len(rows)

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """The map [D, I] and its constant [D]. ridge: what each squared weight costs, as a share of
        the inputs' mean square."""
        size = len(self.products)
        scale = self.products.diagonal().mean() * ridge
        found = torch.linalg.solve(self.products + scale * torch.eye(size), self.wanted)
        return found[:-1].T, found[-1]
