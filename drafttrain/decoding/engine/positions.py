"""Positions of their own for the tokens of one call, where a decoder takes none from outside.

The decoders of encoder-decoder families number new tokens by their place behind the cache. The
nodes of a tree stand at their depth instead. For the length of one call the single module that
knows positions is handed the right ones; all else is the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def embedded_positions(decoder: nn.Module, positions: Tensor) -> Iterator[None]:
    """While it lasts, a BART-like decoder embeds these positions. Shapes: positions [N]."""
    with _argument(decoder.embed_positions, "position_ids", positions):
        yield


@contextmanager
def biased_positions(decoder: nn.Module, positions: Tensor, keys: Tensor) -> Iterator[None]:
    """While it lasts, a T5-like decoder measures distances between these positions.

    Shapes: positions [N] of the new tokens, keys [C + N] of the cached and the new ones.
    """
    attention = decoder.block[0].layer[0].SelfAttention  # it makes the bias that all layers share
    with _argument(attention, "position_bias", relative_bias(attention, positions, keys)):
        yield


def relative_bias(attention: nn.Module, positions: Tensor, keys: Tensor) -> Tensor:
    """The bias that a T5-like decoder adds to its scores, from the distance back to each key.

    The model works out its last row alone, from which all distances are read. A key ahead of its
    query has the bias of distance 0: no token may see it. Shapes: positions [N], keys [M] ->
    [1, heads, N, M].
    """
    longest = int(positions.max()) + 1
    last_row = attention.compute_bias(1, longest, past_seen_tokens=longest - 1)[0, :, 0]
    places = (longest - 1 - positions[:, None] + keys).clamp(max=longest - 1)
    return last_row.index_select(1, places.flatten()).view(1, -1, *places.shape)


@contextmanager
def _argument(module: nn.Module, name: str, value: Tensor) -> Iterator[None]:
    """While it lasts, the module is called with this value for a keyword argument."""

    def replace(_, inputs: tuple, named: dict) -> tuple[tuple, dict]:
        return inputs, named | {name: value}

    handle = module.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
