"""Linear least squares, which initialise drafters that read a target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

RIDGE = 1e-2
"""Ridge penalty of each squared weight, relative to the mean square of the inputs."""


@dataclass
class LeastSquares:
    """Running sums for a linear least squares fit of outputs [N, D] from inputs [N, I]."""

    products: Tensor
    """[I + 1, I + 1] products of inputs with inputs, each row extended by a constant 1."""
    targets: Tensor
    """[I + 1, D] products of extended inputs with outputs."""
    count: int = 0

    @staticmethod
    def empty(inputs: int, outputs: int) -> LeastSquares:
        size = inputs + 1
        return LeastSquares(torch.zeros(size, size), torch.zeros(size, outputs))

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Adds N rows. Shapes: [N, I], [N, D]."""
        rows = F.pad(inputs.float(), (0, 1), value=1.0)
        self.products += rows.T @ rows
        self.targets += rows.T @ outputs.float()
        self.count += len(rows)

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Returns the weights [D, I] and the constant [D]. ridge: as `RIDGE`."""
        size = len(self.products)
        scale = self.products.diagonal().mean() * ridge
        solution = torch.linalg.solve(self.products + scale * torch.eye(size), self.targets)
        return solution[:-1].T, solution[-1]
