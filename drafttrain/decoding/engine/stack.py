"""One decoder for all families: layers as plain tensors, run over a padded batch.

A `Stack` holds what a decoder of Transformers, or a Spec-Drafter's, computes with (`families.py`
reads it off a loaded model). `run_stack` feeds N tokens of each of B sequences, at any positions
and under any mask, and writes their keys and values into a cache in place. It is nothing but
operations on tensors of given shapes, so that it can be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.decoding.engine.attention import attend, ready_mask, rotate
from drafttrain.decoding.engine.products import Linear, Product, multiply, which_are_slots
from drafttrain.models.layout import column_major
from drafttrain.models.spec_drafter.model import UNDRAFTED
from drafttrain.models.spec_drafter.told import as_long

KeysValues = tuple[Tensor, Tensor]
"""Two [B, heads, C, head_dim]: a cache's columns, one a token."""


@dataclass(frozen=True)
class Norm:
    kind: Literal["layer", "rms", "rms-float32", "t5"]
    """rms-float32: computed in float32 and rounded before it is scaled; t5: of the variance alone,
    and the weight's precision is gone on with. As the families do it, whatever the precision."""
    width: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return torch.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
        if self.kind == "rms" or x.dtype == torch.float32 == self.weight.dtype:
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        if self.kind == "rms-float32":
            exact = F.rms_norm(x.float(), (self.width,), None, self.eps)
            return self.weight * exact.to(x.dtype)
        variance = x.float().pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        half = self.weight.dtype in (torch.float16, torch.bfloat16)
        return self.weight * (x.to(self.weight.dtype) if half else x)


@dataclass(frozen=True)
class SelfAttention:
    qkv: Product
    """Queries, keys and values in one product: [(heads + 2 kv_heads) head_dim, D]."""
    out: Product
    heads: int
    kv_heads: int
    scale: float
    query_norm: Norm | None = None
    key_norm: Norm | None = None


@dataclass(frozen=True)
class CrossAttention:
    query: Product
    keys_values: Linear
    """[2 heads head_dim, D of the encoder]."""
    out: Product
    heads: int
    scale: float


@dataclass(frozen=True)
class FeedForward:
    up: Product
    """Where gated: gate and up in one product."""
    down: Product
    activation: Callable[[Tensor], Tensor]
    gated: bool = False

    def __call__(self, x: Tensor, slots: Tensor | int | None = None) -> Tensor:
        x = multiply(self.up, x, slots)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            x = self.activation(gate) * x
        else:
            x = self.activation(x)
        return multiply(self.down, x.to(self.down.dtype), slots)


@dataclass(frozen=True)
class Layer:
    attention: SelfAttention
    attention_norm: Norm
    feed_forward: FeedForward
    feed_forward_norm: Norm
    pre_norm: bool
    cross: CrossAttention | None = None
    cross_norm: Norm | None = None
    parallel: bool = False
    """Attention and feed-forward both read the layer's input (GPT-NeoX)."""


@dataclass(frozen=True)
class Told:
    """What tokens are told of the states that they were predicted from
    (`models/spec_drafter/told.py`)."""

    of_state: Linear
    of_token: Linear

    @property
    def width(self) -> int:
        """Numbers of a state."""
        return self.of_state.weight.shape[1]

    def __call__(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Shapes: [..., E], zeros where there is none, [..., D] -> [..., D]."""
        return self.of_state(as_long(states, embedded)) + self.of_token(embedded)


@dataclass(frozen=True)
class Rotations:
    """Rotary positions: cosines and sines [P, R], of the first R numbers of each head."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Stack:
    """A decoder's weights and settings. Tensors may be the model's own, or copies."""

    embedding: Tensor
    """[V, E]."""
    layers: Sequence[Layer]
    output: Linear | None = None
    """Scores of every token; an encoder has none."""
    scale: float = 1.0
    """Of the embedded tokens."""
    project_in: Linear | None = None
    project_out: Linear | None = None
    """Between the embeddings' width and the layers' (OPT)."""
    positions: Tensor | None = None
    """[P, D], added to embedded tokens; None: positions are rotary or relative."""
    offset: int = 0
    """Row of `positions` that position 0 has."""
    embedding_norm: Norm | None = None
    final_norm: Norm | None = None
    distance_bias: Tensor | None = None
    """[heads, P] added to scores by how far back a key is (T5); further is as the first or last."""
    first_distance: int = 0
    """That the first of them is for; below 0 the key stands behind."""
    output_scale: float = 1.0
    draftable: Tensor | None = None
    """[N] the tokens that `output` has rows of, in rising order; None: all."""
    slot_id: int | None = None
    """The mask, whose rows have weights of their own (`Forked`); None: no row has. A token is fed
    with these weights as the one that lies `len(embedding)` behind it."""
    vocabulary: int | None = None
    """Tokens that are fed and given scores; None: as many as there are rows (`fit_scores`)."""
    told: Told | None = None
    """Where tokens are told another model's states."""

    @property
    def heads(self) -> tuple[int, int]:
        """Heads of keys and values, and their width."""
        attention = self.layers[0].attention
        parts = attention.heads + 2 * attention.kv_heads
        return attention.kv_heads, attention.qkv.width // parts

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def is_slot(self, token: int) -> bool:
        """Whether it is fed with the weights of slots."""
        return token == self.slot_id or token >= len(self.embedding)

    def embed(self, ids: Tensor, positions: Tensor, states: ToldStates | None = None) -> Tensor:
        """Tokens where they stand, and what they are told. Shapes: [B, N] -> [B, N, D]."""
        if self.slot_id is not None:
            ids = ids % len(self.embedding)
        if self.vocabulary is not None:
            ids = known_ids(ids, len(self.embedding))
        x = F.embedding(ids, self.embedding)
        if self.scale != 1.0:
            x = x * self.scale
        if self.project_in is not None:
            x = self.project_in(x)
        alone = x
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset, self.positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.told is None or states is None:
            return x
        return x + self.told(states.states, alone).where(states.there, 0.0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token, float32 at least; `UNDRAFTED` of those that `output` has no row
        of, minus infinity of those that have none at all. Shapes: [..., D] -> [..., V]."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        if self.output_scale != 1.0:
            hidden = hidden * self.output_scale
        assert self.output is not None, "an encoder has no output"
        logits = self.output(hidden.to(self.output.weight.dtype))
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if self.draftable is not None:
            every = logits.new_full((*logits.shape[:-1], len(self.embedding)), UNDRAFTED)
            logits = every.index_copy_(-1, self.draftable, logits)
        return logits if self.vocabulary is None else fit_scores(logits, self.vocabulary)

    def drafting(self, tokens: Tensor) -> Stack:
        """The same decoder, with output rows of these tokens alone. Shapes: [N] in rising order."""
        assert self.output is not None, "an encoder has no output"
        weight, bias = self.output.weight, self.output.bias
        few = Linear(column_major(weight[tokens]), None if bias is None else bias[tokens])
        return replace(self, output=few, draftable=tokens)


def known_ids(ids: Tensor, rows: int) -> Tensor:
    """The tokens as an embedding of so many rows can be fed them: those that it lacks as its last.

    Whatever a drafter is fed, outputs stay exact.
    """
    return ids.clamp(max=rows - 1)


def fit_scores(logits: Tensor, vocabulary: int) -> Tensor:
    """Scores of so many tokens: a drafter's for a target whose embedding is padded otherwise.

    Tokens that the target lacks are cut; those that the drafter lacks score minus infinity, so that
    they are never drafted. Shapes: [..., own] -> [..., V].
    """
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    return F.pad(logits, (0, missing), value=-torch.inf)


@dataclass(frozen=True)
class ToldStates:
    """What the tokens of a call are told."""

    states: Tensor
    """[B, N, E], zeros where there is none."""
    there: Tensor
    """[B, N, 1] true of tokens that are told something, if only that there is no state."""


@dataclass(frozen=True)
class Rows:
    """What a call feeds: N tokens of each of B sequences, those at the end of a line padding."""

    ids: Tensor
    """[B, N]."""
    positions: Tensor
    """[B, N]."""
    columns: Tensor | slice | None
    """[B, N] column of the cache that each is written to; a slice where all lines have the same;
    None without a cache."""
    mask: Tensor | None
    """[B, 1, N, C] true where a token sees a column; None: each sees all."""
    key_positions: Tensor | None = None
    """[B, C] position of each column, where distances are wanted."""
    told: ToldStates | None = None
    """What they are told, where they are told anything."""


@dataclass(frozen=True)
class Memory:
    """What cross-attention reads of the sources."""

    keys_values: Sequence[KeysValues]
    """Of every layer, [B, heads, S, head_dim]."""
    mask: Tensor | None
    """[B, 1, 1, S] true where a source token is; None: all are."""


def run_stack(
    stack: Stack,
    rows: Rows,
    cache: Sequence[KeysValues] | None,
    rotations: Rotations | None = None,
    memory: Memory | None = None,
    embedded: Tensor | None = None,
    kept: dict[int, Tensor | None] | None = None,
) -> Tensor:
    """Hidden states after the final norm; keys and values go into the cache, in place.

    cache: of every layer, the first C columns of B sequences; None: tokens see each other alone, as
    in an encoder. embedded takes the place of the
    embedded tokens; in `kept` the outputs of the layers that it has numbers of are put, [B, N, D]
    each. Shapes: -> [B, N, D].
    """
    x = stack.embed(rows.ids, rows.positions, rows.told) if embedded is None else embedded
    rotary = None
    if rotations is not None:
        rotary = (
            F.embedding(rows.positions, rotations.cos),
            F.embedding(rows.positions, rotations.sin),
        )
    mask = rows.mask
    if stack.distance_bias is not None:
        mask = _distances(stack.distance_bias, stack.first_distance, rows)
    slots = which_are_slots(rows.ids, stack.slot_id, len(stack.embedding))
    first = stack.layers[0].attention
    mask = ready_mask(mask, first.heads, first.kv_heads, x)
    for number, layer in enumerate(stack.layers):
        cross = None if memory is None else memory.keys_values[number]
        cross_mask = None if memory is None else memory.mask
        own = None if cache is None else cache[number]
        x = _run_layer(layer, x, rows.columns, mask, own, rotary, cross, cross_mask, slots)
        if kept is not None and number in kept:
            kept[number] = x
    return x if stack.final_norm is None else stack.final_norm(x)


def _run_layer(layer, x, columns, mask, cache, rotary, cross, cross_mask, slots) -> Tensor:
    own = (columns, mask, cache, rotary, slots)
    if layer.parallel:
        mixed = _attend(layer.attention, layer.attention_norm(x), *own)
        return layer.feed_forward(layer.feed_forward_norm(x)) + mixed + x
    pre = layer.pre_norm
    start = layer.attention_norm(x) if pre else x
    x = x + _attend(layer.attention, start, *own)
    x = x if pre else layer.attention_norm(x)
    if layer.cross is not None:
        start = layer.cross_norm(x) if pre else x
        x = x + _look_across(layer.cross, start, cross, cross_mask, slots)
        x = x if pre else layer.cross_norm(x)
    start = layer.feed_forward_norm(x) if pre else x
    x = x + layer.feed_forward(start, slots)
    return x if pre else layer.feed_forward_norm(x)


def _attend(attention, x, columns, mask, cache, rotary, slots) -> Tensor:
    """Self-attention of new tokens over the cache, themselves included."""
    batch, new, _ = x.shape
    heads, kv_heads = attention.heads, attention.kv_heads
    mixed = multiply(attention.qkv, x, slots).view(batch, new, heads + 2 * kv_heads, -1)
    query, key, value = torch.split_with_sizes(mixed, (heads, kv_heads, kv_heads), dim=2)
    if attention.query_norm is not None:
        query, key = attention.query_norm(query), attention.key_norm(key)
    if rotary is not None:
        query, key = rotate(query, *rotary), rotate(key, *rotary)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if cache is not None:
        key, value = _remember(cache, columns, key, value)
    return multiply(attention.out, attend(query, key, value, mask, attention.scale), slots)


def _remember(cache: KeysValues, columns: Tensor | slice, key: Tensor, value: Tensor) -> KeysValues:
    """Write what is new into the cache; all that it holds. Shapes: new [B, heads, N, head_dim]."""
    for states, new in zip(cache, (key, value), strict=True):
        if isinstance(columns, slice):
            states[:, :, columns] = new
        else:
            lines = torch.arange(len(new), device=new.device)[:, None]
            states.transpose(1, 2).index_put_((lines, columns), new.transpose(1, 2))
    return cache


def _look_across(attention: CrossAttention, x, keys_values: KeysValues, mask, slots) -> Tensor:
    query = multiply(attention.query, x, slots).view(*x.shape[:2], attention.heads, -1)
    return multiply(attention.out, attend(query, *keys_values, mask, attention.scale), slots)


def _distances(bias: Tensor, first: int, rows: Rows) -> Tensor:
    """The bias of every token and column, minus infinity where a token does not see it."""
    assert rows.key_positions is not None
    back = rows.positions[:, :, None] - rows.key_positions[:, None, :]
    index = (back - first).clamp(0, bias.shape[1] - 1)
    found = bias[:, index].transpose(0, 1)
    return found if rows.mask is None else found.masked_fill(~rows.mask, -torch.inf)
