"""Comparisons of models and of computed tensors.

Weights are compared bit for bit, computed tensors up to rounding, because the order of additions
depends on CPU, number of threads and memory alignment.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def same_weights(
    one: nn.Module | Mapping[str, Tensor], other: nn.Module | Mapping[str, Tensor]
) -> bool:
    """Returns whether two models, or two state dictionaries, are equal bit for bit."""
    one, other = (m.state_dict() if isinstance(m, nn.Module) else m for m in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_but_undrafted(one: nn.Module, exported: nn.Module) -> bool:
    """Returns whether an exported language model has the same weights bit for bit, except the
    output rows of tokens outside its draft vocabulary, which must differ."""
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
    """Asserts that two tensors are equal up to `precision`, relative and absolute."""
    torch.testing.assert_close(seen, expected, rtol=precision, atol=precision)
