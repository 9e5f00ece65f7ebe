"""Positions that a decoder is given for the time of a call, where its `forward` takes none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Current:
    """The call that is being computed, for functions that models call."""

    call: Any = None
    """A `ForwardBatch`, while there is one."""


Replacement = tuple[nn.Module, str, Callable[..., Tensor]]
"""A module, the name of a method of it, and what is called instead."""


@contextmanager
def replacing(functions: Sequence[Replacement]) -> Iterator[None]:
    """Have modules use these functions as their methods, until it ends."""
    former = [(module, name, vars(module).get(name)) for module, name, _ in functions]
    for module, name, function in functions:
        object.__setattr__(module, name, function)
    try:
        yield
    finally:
        for module, name, own in former:
            if own is None:
                object.__delattr__(module, name)
            else:
                object.__setattr__(module, name, own)


def positions_inside(decoder: nn.Module, current: Current) -> Iterator[Replacement]:
    """Methods by which a decoder places tokens, and what gives them the current call's positions.

    BART-like decoders look positions up in `embed_positions`; T5-like ones compute a bias from
    distances.
    """
    table = getattr(decoder, "embed_positions", None)
    if isinstance(table, nn.Module):
        yield table, "forward", lambda *given, **named: _look_up(table, current.call)
    for module in decoder.modules():
        if getattr(module, "has_relative_attention_bias", False):
            yield module, "compute_bias", _bias_of(module, current)


def _bias_of(module: nn.Module, current: Current) -> Callable[..., Tensor]:
    return lambda *given, **named: _relative_bias(module, current.call)


def _look_up(table: nn.Module, call: Any) -> Tensor:
    """[B, N, D] rows of a table of positions."""
    if isinstance(getattr(table, "weights", None), Tensor):  # sinusoids of M2M100
        return table.weights[call.positions + table.padding_idx + 1]
    return F.embedding(call.positions + getattr(table, "offset", 0), table.weight)


def _relative_bias(attention: nn.Module, call: Any) -> Tensor:
    """[B, heads, N, C] what T5 adds to scores by the distance between two positions."""
    distances = call.key_positions[:, None, :] - call.positions[:, :, None]
    bucket = attention._relative_position_bucket
    options: dict[str, Any] = {}
    if "bidirectional" in inspect.signature(bucket).parameters:
        options = {
            "bidirectional": False,
            "num_buckets": attention.relative_attention_num_buckets,
            "max_distance": attention.relative_attention_max_distance,
        }
    bias = attention.relative_attention_bias(bucket(distances, **options))
    return bias.permute(0, 3, 1, 2)
