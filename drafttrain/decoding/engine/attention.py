"""Attention of a few new rows over what a cache holds, and rotary positions.

Operations on tensors of given shapes, so that they can be compiled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 64
"""Most rows whose scores are worked out as a product of their own on a CPU (`by_products`)."""


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float):
    """Attention where each group of query heads shares a head of keys and values.

    The queries of a group are handed over as so many more rows, so that no key is copied. Shapes:
    query [B, N, H, W], keys and values [B, K, C, W], mask as `ready_mask` has made it
    -> [B, N, H W].
    """
    batch, new, heads, width = query.shape
    groups = heads // keys.shape[1]
    if groups == 1:
        query = query.transpose(1, 2)
    else:
        query = query.view(batch, new, -1, groups, width).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, -1, groups * new, width)
    if by_products(query, query.shape[2]):
        mixed = _attend_by_products(query, keys, values, mask, scale)
    else:
        mixed = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale)
    if groups > 1:
        mixed = mixed.view(batch, -1, groups, new, width).permute(0, 3, 1, 2, 4)
        return mixed.reshape(batch, new, heads * width)
    return mixed.transpose(1, 2).reshape(batch, new, heads * width)


def by_products(like: Tensor, rows: int) -> bool:
    """Whether two plain products do it faster than the fused kernel: for a few rows on a CPU.

    Shapes: like [B, ...], of so many rows each.
    """
    precise = like.dtype in (torch.float32, torch.float64)
    single = rows == 1 == len(like)
    return like.device.type == "cpu" and precise and rows <= FEW_ROWS and not single


def ready_mask(mask: Tensor | None, heads: int, kv_heads: int, like: Tensor) -> Tensor | None:
    """The mask as every layer's attention takes it, made once: a row for each query of a group.

    Shapes: mask [B, 1 or H, N, C], like [B, N, D] -> [B, 1 or H, G N, C], or where it is added to
    products [B K, G N, C].
    """
    groups = heads // kv_heads
    rows = groups * like.shape[1]
    if mask is None:
        return None
    if not by_products(like, rows):
        return mask.repeat(1, 1, groups, 1) if groups > 1 else mask
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, -torch.inf)
    mask = mask.expand(len(like), kv_heads, like.shape[1], -1)
    if groups > 1:
        mask = mask.repeat(1, 1, groups, 1)
    return mask.reshape(-1, rows, mask.shape[-1])


def _attend_by_products(query, keys, values, mask, scale) -> Tensor:
    """Shapes: query [B, K, N, W], keys and values [B, K, C, W], mask as `ready_mask` has made it,
    or [B, 1, 1, C] bool -> [B, K, N, W]."""
    batch, heads, rows, width = query.shape
    query = query.reshape(-1, rows, width)
    turned = keys.reshape(batch * heads, -1, width).transpose(1, 2)
    if mask is not None and mask.dim() == 3:
        scores = torch.baddbmm(mask, query, turned, alpha=scale)
    else:
        scores = torch.bmm(query, turned).mul_(scale)
        if mask is not None:
            scores.view(batch, heads, rows, -1).masked_fill_(~mask, -torch.inf)
    mixed = torch.bmm(scores.softmax(-1), values.reshape(batch * heads, -1, width))
    return mixed.view(batch, heads, rows, width)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: halves of the first numbers of a head turn into each other.

    Shapes: x [B, N, H, W], cos and sin [B, N, R], R at most W.
    """
    turned = cos.shape[-1]
    moving = x[..., :turned]
    first, second = moving.chunk(2, dim=-1)
    halves = torch.cat((-second, first), dim=-1)
    moving = moving * cos[:, :, None] + halves * sin[:, :, None]
    return moving if turned == x.shape[-1] else torch.cat((moving, x[..., turned:]), dim=-1)
