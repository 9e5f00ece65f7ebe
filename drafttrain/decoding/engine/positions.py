"""Explicit positions for decoders whose `forward` takes none, by replacing methods in a call."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Replacement = tuple[nn.Module, str, Callable[..., Tensor]]
"""A module, the name of one of its methods, and the function to call instead."""


@contextmanager
def replacing(functions: Sequence[Replacement]) -> Iterator[None]:
    """Replaces methods of modules by these functions inside the context."""
    originals = [vars(module).get(name) for module, name, _ in functions]
    for module, name, function in functions:
        object.__setattr__(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), original in zip(functions, originals, strict=True):
            object.__delattr__(module, name)
            if original is not None:  # else the method is the class's
                object.__setattr__(module, name, original)


def positions_inside(decoder: nn.Module, body: Any) -> Iterator[Replacement]:
    """Yields replacements that make a decoder use the positions of `TransformersBody.call`.

    BART-like decoders look positions up in `embed_positions`; T5-like ones compute an attention
    bias from distances between positions.
    """
    table = getattr(decoder, "embed_positions", None)
    if isinstance(table, nn.Module):
        yield table, "forward", lambda *_, **__: _look_up(table, body.call)
    for module in decoder.modules():
        if getattr(module, "has_relative_attention_bias", False):
            yield module, "compute_bias", lambda *_, own=module, **__: _bias(own, body.call)


def _look_up(table: nn.Module, call: Any) -> Tensor:
    """Returns the position embeddings [B, N, D] of a call."""
    if isinstance(getattr(table, "weights", None), Tensor):  # M2M100's sinusoids
        return table.weights[call.positions + table.padding_idx + 1]
    offload = getattr(table, "_hf_hook", None)  # Accelerate's: loads the table for a call
    if offload is not None:
        offload.pre_forward(table)
    found = F.embedding(call.positions + getattr(table, "offset", 0), table.weight)
    return found if offload is None else offload.post_forward(table, found)


def _bias(attention: nn.Module, call: Any) -> Tensor:
    """Returns T5's bias [B, heads, N, C], added to attention scores by distance of positions."""
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
