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


def same_but_undrafted(one: nn.Module, exported: nn.Module) -> bool:
    """Whether an export has all weights of a language model but output rows of tokens that it does
    not draft, which never win there: bit for bit."""
    own, out = one.state_dict(), exported.state_dict()
    few, name = one.config.draftable_tokens, "lm_head.weight"
    others = [row for row in range(len(own[name])) if row not in set(few)]
    assert few and others and not torch.equal(own[name][others], out[name][others])
    left = own.keys() - {name}
    return same_weights(
        {key: own[key] for key in left} | {name: own[name][few]},
        {key: out[key] for key in out.keys() - {name}} | {name: out[name][few]},
    )


def close(seen: Tensor, expected: Tensor, precision: float = 1e-10) -> None:
    """Fails, with the numbers, where two tensors are not equal up to `precision`."""
    torch.testing.assert_close(seen, expected, rtol=precision, atol=precision)
