"""When two models, or what they computed, are the same.

Weights are compared bit for bit. What is computed from them is compared up to rounding: another
CPU, number of threads or place in memory adds up in another order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def same_weights(
    one: nn.Module | Mapping[str, Tensor], other: nn.Module | Mapping[str, Tensor]
) -> bool:
    """Whether two models, or two state dictionaries, are equal bit for bit."""
    one, other = (m.state_dict() if isinstance(m, nn.Module) else m for m in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(seen: Tensor, expected: Tensor, precision: float = 1e-10) -> None:
    """Fails, with the numbers, where two tensors are not equal up to `precision`."""
    torch.testing.assert_close(seen, expected, rtol=precision, atol=precision)
