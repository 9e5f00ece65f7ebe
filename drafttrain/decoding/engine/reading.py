"""Weights and settings of modules, as a `Stack` holds them.

Weights stay the model's own where they can; queries, keys and values (and gate and up) of a layer
are put into one matrix. How matrices lie in memory is left to `products.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from drafttrain.decoding.engine.products import Linear
from drafttrain.decoding.engine.stack import CrossAttention, Norm, SelfAttention
from drafttrain.models.layout import column_major

COPIED = 2**23
"""Most numbers of weights that are put side by side in a copy."""


def linear(*modules: nn.Linear) -> Linear:
    """The product of a layer; of several that read the same, one for all where they are small.

    One product for all takes a copy of their weights, which saves nothing where they are large.
    """
    parts = [
        Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())
        for module in modules
    ]
    if len(parts) == 1:
        return parts[0]
    if sum(part.weight.numel() for part in parts) > COPIED:
        return Linear.side_by_side(parts)
    weight, bias = torch.cat([part.weight for part in parts]), None
    if any(part.bias is not None for part in parts):
        bias = torch.cat(
            [weight.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in parts]
        )
    return Linear(column_major(weight), bias)


def turned(module: nn.Module) -> Linear:
    """GPT-2's Conv1D, whose weight is [in, out]."""
    return Linear(module.weight.detach().t(), module.bias.detach())


def layer_norm(module: nn.LayerNorm) -> Norm:
    weight, bias = (None if one is None else one.detach() for one in (module.weight, module.bias))
    return Norm("layer", module.normalized_shape[0], weight, bias, module.eps)


def rms_norm(module: nn.Module, kind: str) -> Norm:
    weight = module.weight.detach()
    return Norm(kind, len(weight), weight, None, module.variance_epsilon)


def self_attention(module: nn.Module) -> SelfAttention:
    """Of a BART-like part, or an OPT."""
    heads, qkv = module.num_heads, linear(module.q_proj, module.k_proj, module.v_proj)
    return SelfAttention(qkv, linear(module.out_proj), heads, heads, module.scaling)


def cross_attention(module: nn.Module) -> CrossAttention:
    """Of a BART-like decoder."""
    keys_values = linear(module.k_proj, module.v_proj)
    query, out = linear(module.q_proj), linear(module.out_proj)
    return CrossAttention(query, keys_values, out, module.num_heads, module.scaling)
