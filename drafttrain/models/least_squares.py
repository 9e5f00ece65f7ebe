"""Linear least squares, which initialise drafters that read a target's hidden states."""

import torch
import torch.nn.functional as F
from torch import Tensor

RIDGE = 1e-2
"""Ridge penalty of each squared weight, relative to the mean square of the inputs."""


class LeastSquares:
    """Running sums for a linear least squares fit of outputs [N, D] from inputs [N, I]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.products = torch.zeros(inputs + 1, inputs + 1)
        """[I + 1, I + 1] products of inputs with inputs, each row extended by a constant 1."""
        self.targets = torch.zeros(inputs + 1, outputs)
        """[I + 1, D] products of extended inputs with outputs."""
        self.count = 0

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
