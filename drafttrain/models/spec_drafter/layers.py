"""Transformer layers whose norm, positions, activation and scaling are settings.

They compute what the Marian, BART, mBART, Pegasus and T5 families compute, so that a Spec-Drafter
can start from any of them; decoder rows may stand at any positions and be masked in any way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from drafttrain.models.spec_drafter.config import SpecDrafterConfig


class Dropout(nn.Module):
    """As nn.Dropout; on a CPU in a third of the time, from 16 random bits a unit.

    There p is rounded to a multiple of 2**-16, and what is kept is scaled accordingly.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        kept, scale = self._draw(x)
        return x * kept.mul_(scale)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """x plus the update, of which some units are dropped. Shapes: all [..., D]."""
        if not self.training or self.p == 0 or x.device.type != "cpu":
            return x + self(update)
        kept, scale = self._draw(update)
        return torch.addcmul(x, update, kept, value=scale)

    def _draw(self, x: Tensor) -> tuple[Tensor, float]:
        """1 where a unit is kept, else 0, shaped as x; and what to scale the kept ones by."""
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)
        dropped = round(self.p * 2**16)
        kept = torch.ge(bits, dropped - 2**15, out=torch.empty_like(bits))  # faster than to bool
        return kept.to(x.dtype), 2**16 / (2**16 - dropped)


class Norm(nn.Module):
    """Layer norm, or T5's root-mean-square norm without mean and bias."""

    def __init__(self, config: SpecDrafterConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if config.norm == "layer" else None
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Puts the new rows' keys and values [B, H, T, C] after those that are cached; returns all."""


def of_rows(own: nn.Module, of_slots: nn.Module | None, slots: Tensor | None, x: Tensor) -> Tensor:
    """What a layer computes, where slots have weights of their own with those for slots.

    of_slots: None where they have not. slots [B, T]: which rows they are; None: all.
    """
    if of_slots is None:
        return own(x)
    if slots is None:
        return of_slots(x)
    return torch.where(slots[..., None], of_slots(x), own(x))


class SelfAttention(nn.Module):
    def __init__(self, config: SpecDrafterConfig):
        super().__init__()
        inner = config.attention_heads * config.head_dim
        self.heads, self.scale = config.attention_heads, config.attention_scale
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=config.bias)
        self.out = nn.Linear(inner, config.d_model, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        extend: Extend | None = None,
        other: SelfAttention | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Shapes: x [B, T, D], mask [B, 1|H, T, S] -> [B, T, D], [2, ...]; other, slots: as in
        `of_rows`. Returns the output and the new rows' keys and values."""
        batch, length, _ = x.shape
        qkv = of_rows(self.qkv, other and other.qkv, slots, x)
        query, key, value = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        new = (key, value)
        if extend is not None:
            key, value = extend(key, value)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return of_rows(self.out, other and other.out, slots, mixed), new


class CrossAttention(nn.Module):
    def __init__(self, config: SpecDrafterConfig, of_slots: bool = False):
        super().__init__()
        inner = config.attention_heads * config.head_dim
        self.heads, self.scale = config.attention_heads, config.attention_scale
        self.query = nn.Linear(config.d_model, inner, bias=config.bias)
        self.kv = None  # slots look at the same keys and values as tokens
        if not of_slots:
            self.kv = nn.Linear(config.source_width, 2 * inner, bias=config.bias)
        self.out = nn.Linear(inner, config.d_model, bias=config.bias)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output. Shapes: [B, S, E] -> two [B, H, S, C]."""
        batch, length, _ = memory.shape
        key, value = self.kv(memory).view(batch, length, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        return key, value

    def forward(
        self,
        x: Tensor,
        keys_values: tuple[Tensor, Tensor],
        mask: Tensor | None,
        other: CrossAttention | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        batch, length, _ = x.shape
        query = of_rows(self.query, other and other.query, slots, x)
        query = query.view(batch, length, self.heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, *keys_values, mask, scale=self.scale)
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return of_rows(self.out, other and other.out, slots, mixed)


class FeedForward(nn.Module):
    def __init__(self, config: SpecDrafterConfig):
        super().__init__()
        width, inner, bias = config.d_model, config.ffn_dim, config.bias
        self.up = nn.Linear(width, inner, bias)
        self.gate = nn.Linear(width, inner, bias) if config.gated_ffn else None
        self.down = nn.Linear(inner, width, bias)
        self.activation = ACT2FN[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class SlotWeights(nn.Module):
    """What a decoder layer multiplies masked slots with, where it has weights of their own."""

    def __init__(self, config: SpecDrafterConfig):
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.cross_attention = CrossAttention(config, of_slots=True)
        self.feed_forward = FeedForward(config)


class Layer(nn.Module):
    """A Transformer layer, pre- or post-norm; with cross-attention in the decoder."""

    def __init__(self, config: SpecDrafterConfig, cross: bool):
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.self_norm = Norm(config)
        self.cross_attention = CrossAttention(config) if cross else None
        self.cross_norm = Norm(config) if cross else None
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = Norm(config)
        self.pre_norm = config.norm_position == "pre"
        self.slots = SlotWeights(config) if cross and config.slot_weights == "own" else None
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: tuple[Tensor, Tensor] | None = None,
        memory_mask: Tensor | None = None,
        extend: Extend | None = None,
        slots: Tensor | bool = False,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Rows of tokens, or of masked slots, which may have weights of their own.

        slots: whether all rows are slots, or which are [B, T]. Shapes: x [B, T, D] -> [B, T, D],
        and the rows' keys and values [B, H, T, C].
        """
        other = self.slots if slots is not False else None
        which = slots if isinstance(slots, Tensor) else None
        mixed, new = self.self_attention(
            self._before(x, self.self_norm), mask, extend, other and other.self_attention, which
        )
        x = self._after(x, mixed, self.self_norm)
        if self.cross_attention is not None:
            start = self._before(x, self.cross_norm)
            of_slots = other and other.cross_attention
            mixed = self.cross_attention(start, memory, memory_mask, of_slots, which)
            x = self._after(x, mixed, self.cross_norm)
        start = self._before(x, self.feed_forward_norm)
        mixed = of_rows(self.feed_forward, other and other.feed_forward, which, start)
        return self._after(x, mixed, self.feed_forward_norm), new

    def _before(self, x: Tensor, norm: Norm) -> Tensor:
        return norm(x) if self.pre_norm else x

    def _after(self, x: Tensor, update: Tensor, norm: Norm) -> Tensor:
        x = self.dropout.add(x, update)
        return x if self.pre_norm else norm(x)


class RelativeBias(nn.Module):
    """T5's bucketed relative position bias, for rows at any positions."""

    def __init__(self, config: SpecDrafterConfig, bidirectional: bool):
        super().__init__()
        self.buckets, self.bidirectional = config.relative_buckets, bidirectional
        self.max_distance = config.relative_max_distance
        self.embedding = nn.Embedding(config.relative_buckets, config.attention_heads)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Shapes: [B, T], [B, S] -> [B, H, T, S]."""
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        buckets, result = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            result = result + (distance > 0).long() * buckets
            distance = distance.abs()
        else:
            distance = -distance.clamp(max=0)
        exact = buckets // 2
        far = exact + (
            torch.log(distance.float() / exact) / math.log(self.max_distance / exact)
        ).mul(buckets - exact).long().clamp(max=buckets - 1)
        far = torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
        return self.embedding(result + far).permute(0, 3, 1, 2)


class Stack(nn.Module):
    """Embedding positions, layers and norms of the encoder or the decoder."""

    def __init__(self, config: SpecDrafterConfig, decoder: bool):
        super().__init__()
        count = config.decoder_layers if decoder else config.encoder_layers
        self.config = config
        self.layers = nn.ModuleList(Layer(config, cross=decoder) for _ in range(count))
        self.embedding_norm = Norm(config) if config.embedding_norm else None
        self.final_norm = Norm(config) if config.norm_position == "pre" else None
        self.learned_positions = self.relative_bias = None
        if config.positions == "learned":
            rows = config.max_positions + config.position_offset
            self.learned_positions = nn.Embedding(rows, config.d_model)
        elif config.positions == "relative":
            self.relative_bias = RelativeBias(config, bidirectional=not decoder)
        else:
            table = sinusoids(config.max_positions, config.d_model)
            self.register_buffer("sinusoids", table, persistent=False)
        self.dropout = Dropout(config.dropout)

    def embed_positions(self, positions: Tensor) -> Tensor | None:
        """Shapes: [B, T] -> [B, T, D], or None where positions are relative."""
        if self.learned_positions is not None:
            return self.learned_positions(positions + self.config.position_offset)
        if self.config.positions == "sinusoidal":
            return self.sinusoids[positions]
        return None

    def start(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Embedded tokens with their positions, normalised and dropped out."""
        placed = self.embed_positions(positions)
        x = embedded if placed is None else embedded + placed
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x)

    def bias(self, mask: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor | None:
        """The mask, with the relative position bias where the family has one."""
        if self.relative_bias is None:
            return mask
        bias = self.relative_bias(queries, keys)
        return bias if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min)

    def finish(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self.dropout(self.final_norm(x))


def sinusoids(length: int, width: int) -> Tensor:
    """Sine positions, sines in the first half and cosines in the second, as Marian has them."""
    frequency = 10000.0 ** (-2 * torch.arange((width + 1) // 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()[:, : width // 2]), dim=1).float()
