"""Spec-Drafter: a deep encoder and a shallow mask-predict decoder (SpecDec, Section 3.1).

The decoder reads the accepted prefix followed by k slots and predicts all k tokens in one pass.
Two slot conventions:

- `paper`: the decoder input is not shifted; slots are k masks and slot i predicts token i.
- `anchored` (ours): the input is shifted like the target's own (start token, y_1, ..., y_p); the
  position of the last committed token predicts y_{p+1} and k - 1 masks predict the rest, so the
  decoder can start from the target's own layers.

One network covers the Marian, BART, mBART, Pegasus and T5 families: norm, positions, activation
and scaling are settings, and `models/initialise.py` reads them and the weights off a target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

PREFIX = -1
"""Value of `block` for rows of the prefix."""
PADDING = -2
"""Value of `block` for rows that are padding."""


class SpecDrafterConfig(PretrainedConfig):
    """Shape of a Spec-Drafter. Everything about the target's family is a plain field."""

    model_type = "spec-drafter"
    is_encoder_decoder = True

    def __init__(
        self,
        vocab_size: int = 32,
        d_model: int = 512,
        encoder_layers: int = 12,
        decoder_layers: int = 2,
        attention_heads: int = 8,
        head_dim: int | None = None,
        ffn_dim: int = 2048,
        activation: str = "relu",
        gated_ffn: bool = False,
        norm: Literal["layer", "rms"] = "layer",
        norm_position: Literal["pre", "post"] = "post",
        norm_eps: float = 1e-5,
        bias: bool = True,
        positions: Literal["sinusoidal", "learned", "relative"] = "sinusoidal",
        max_positions: int = 512,
        position_offset: int = 0,
        relative_buckets: int = 32,
        relative_max_distance: int = 128,
        embedding_scale: float = 1.0,
        embedding_norm: bool = False,
        attention_scale: float | None = None,
        logit_scale: float = 1.0,
        untied_output: bool = False,
        logits_bias: bool = False,
        dropout: float = 0.1,
        k: int = 10,
        slots: Literal["anchored", "paper"] = "anchored",
        prefix_attention: Literal["causal", "bidirectional"] = "causal",
        soft_copy: bool = False,
        coupling_rank: int = 0,
        mask_id: int | None = None,
        pad_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        decoder_start_token_id: int | None = None,
        target: dict | None = None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.attention_heads = attention_heads
        self.head_dim = head_dim if head_dim is not None else d_model // attention_heads
        self.ffn_dim = ffn_dim
        self.activation = activation
        self.gated_ffn = gated_ffn
        self.norm = norm
        self.norm_position = norm_position
        self.norm_eps = norm_eps
        self.bias = bias
        self.positions = positions
        self.max_positions = max_positions
        self.position_offset = position_offset
        self.relative_buckets = relative_buckets
        self.relative_max_distance = relative_max_distance
        self.embedding_scale = embedding_scale
        self.embedding_norm = embedding_norm
        self.attention_scale = (
            attention_scale if attention_scale is not None else self.head_dim**-0.5
        )
        self.logit_scale = logit_scale
        self.untied_output = untied_output
        self.logits_bias = logits_bias
        self.dropout = dropout
        self.k = k
        self.slots = slots
        self.prefix_attention = prefix_attention
        self.soft_copy = soft_copy
        self.coupling_rank = coupling_rank
        # the tokenizer's mask, an unused id, or vocab_size: one more row, inside the drafter only
        self.mask_id = mask_id if mask_id is not None else vocab_size
        self.target = target
        kwargs.setdefault("tie_word_embeddings", False)  # shared rows are one parameter here
        kwargs["is_encoder_decoder"] = True
        super().__init__(**kwargs)
        # set last and as given: the base class must not range-check the mask row
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.decoder_start_token_id = decoder_start_token_id

    @property
    def hidden_size(self) -> int:
        return self.d_model

    @property
    def embedding_rows(self) -> int:
        return max(self.vocab_size, self.mask_id + 1)

    @property
    def mask_rows(self) -> int:
        """Masked rows of a block of k: k for `paper`, k - 1 for `anchored`."""
        return self.k - 1 if self.slots == "anchored" else self.k


@dataclass(frozen=True)
class Memory:
    """What the decoder keeps of one source: cross-attention keys and values of every layer."""

    keys_values: list[tuple[Tensor, Tensor]]
    mask: Tensor | None
    """[B, 1, 1, S] true where a source token is; None: all are."""
    source: tuple[Tensor, Tensor] | None = None
    """Two [B, S, D], embedded source without and with positions, for softly copied slots only."""


@dataclass(frozen=True)
class Rows:
    """Decoder input rows: a prefix and masked blocks, all of one sentence in one line.

    A row of the prefix (block = PREFIX) sees prefix rows up to position `limit`; a row of block b
    sees prefix rows up to `limit` and every row of block b. Shapes: all [B, T].
    """

    tokens: Tensor
    positions: Tensor
    block: Tensor
    limit: Tensor

    def visible(self, bidirectional: bool) -> Tensor:
        """[B, 1, T, T] true where row t may look at row s."""
        is_prefix = self.block == PREFIX
        prefix = is_prefix[:, None, :] & (self.positions[:, None, :] <= self.limit[:, :, None])
        same = (self.block[:, None, :] == self.block[:, :, None]) & (self.block >= 0)[:, :, None]
        seen = prefix | same
        if bidirectional:  # one block: the prefix sees it too
            seen = seen | (is_prefix[:, :, None] & (self.block == 0)[:, None, :])
        return seen[:, None]


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


class SelfAttention(nn.Module):
    def __init__(self, config: SpecDrafterConfig):
        super().__init__()
        inner = config.attention_heads * config.head_dim
        self.heads, self.scale = config.attention_heads, config.attention_scale
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=config.bias)
        self.out = nn.Linear(inner, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, mask: Tensor | None, past: Tensor | None = None):
        """Shapes: x [B, T, D], mask [B, 1|H, T, S], past [2, B, H, P, C] -> [B, T, D], [2, ...].

        Returns the output and the new rows' keys and values.
        """
        batch, length, _ = x.shape
        query, key, value = (
            self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        new = (key, value)
        if past is not None:
            key = torch.cat((past[0], key), dim=2)
            value = torch.cat((past[1], value), dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1)), new


class CrossAttention(nn.Module):
    def __init__(self, config: SpecDrafterConfig):
        super().__init__()
        inner = config.attention_heads * config.head_dim
        self.heads, self.scale = config.attention_heads, config.attention_scale
        self.query = nn.Linear(config.d_model, inner, bias=config.bias)
        self.kv = nn.Linear(config.d_model, 2 * inner, bias=config.bias)
        self.out = nn.Linear(inner, config.d_model, bias=config.bias)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output. Shapes: [B, S, D] -> two [B, H, S, C]."""
        batch, length, _ = memory.shape
        key, value = self.kv(memory).view(batch, length, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        return key, value

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, *keys_values, mask, scale=self.scale)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, config: SpecDrafterConfig):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.ffn_dim, bias=config.bias)
        self.gate = (
            nn.Linear(config.d_model, config.ffn_dim, bias=config.bias)
            if config.gated_ffn
            else None
        )
        self.down = nn.Linear(config.ffn_dim, config.d_model, bias=config.bias)
        self.activation = ACT2FN[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


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
        self.dropout = nn.Dropout(config.dropout)

    def _residual(self, x: Tensor, norm: Norm, function) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(function(norm(x)))
        return norm(x + self.dropout(function(x)))

    def forward(self, x, mask, memory=None, memory_mask=None, past=None):
        new: list = []

        def self_attention(rows: Tensor) -> Tensor:
            mixed, keys_values = self.self_attention(rows, mask, past)
            new.append(keys_values)
            return mixed

        x = self._residual(x, self.self_norm, self_attention)
        if self.cross_attention is not None:
            x = self._residual(
                x, self.cross_norm, lambda rows: self.cross_attention(rows, memory, memory_mask)
            )
        return self._residual(x, self.feed_forward_norm, self.feed_forward), new[0]


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
        self.learned_positions = (
            nn.Embedding(config.max_positions + config.position_offset, config.d_model)
            if config.positions == "learned"
            else None
        )
        if config.positions == "relative":
            self.relative_bias = RelativeBias(config, bidirectional=not decoder)
        else:
            self.relative_bias = None
        if config.positions == "sinusoidal":
            self.register_buffer(
                "sinusoids", sinusoids(config.max_positions, config.d_model), persistent=False
            )
        self.dropout = nn.Dropout(config.dropout)

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


class SpecDrafter(PreTrainedModel):
    """The drafter of SpecDec. `encode` once a source, `decode` once a round, `logits` on slots."""

    config_class = SpecDrafterConfig
    base_model_prefix = "drafter"
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: SpecDrafterConfig):
        super().__init__(config)
        if config.prefix_attention == "bidirectional" and config.slots == "anchored":
            raise ValueError(
                "anchored slots need a causal prefix (a prefix that sees the slots would see its "
                "own labels); set drafter.slots=paper or drafter.prefix_attention=causal"
            )
        if config.soft_copy and config.positions == "relative":
            raise ValueError(
                "softly copied slots are addressed by position embeddings, which a target with "
                "relative positions (T5) has not; set drafter.soft_copy=false"
            )
        self.embedding = nn.Embedding(config.embedding_rows, config.d_model)
        self.output = (
            nn.Linear(config.d_model, config.vocab_size, bias=False)
            if config.untied_output
            else None
        )
        self.logits_bias = (
            nn.Parameter(torch.zeros(config.vocab_size)) if config.logits_bias else None
        )
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        self.soft_copy = (
            nn.Linear(config.d_model, config.d_model, bias=False) if config.soft_copy else None
        )
        if config.coupling_rank:
            self.coupling_hidden = nn.Linear(config.d_model, config.coupling_rank)
            self.coupling_previous = nn.Embedding(config.embedding_rows, config.coupling_rank)
            self.coupling_out = nn.Linear(config.coupling_rank, config.d_model, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        std = 0.02 if self.config.embedding_scale == 1.0 else self.config.d_model**-0.5
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Stack) and self.config.positions == "sinusoidal":
            module.sinusoids.copy_(sinusoids(self.config.max_positions, self.config.d_model))
        elif isinstance(module, SpecDrafter):
            if module.logits_bias is not None:
                nn.init.zeros_(module.logits_bias)
            if self.config.coupling_rank:  # starts as no correction at all
                nn.init.zeros_(module.coupling_out.weight)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.config.embedding_scale

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Memory:
        """Encoder and cross-attention projections, once a source.

        Shapes: input_ids [B, S], attention_mask [B, S] (1 = token) or None.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        embedded = self.embed(input_ids)
        x = self.encoder.start(embedded, positions)
        bias = self.encoder.bias(mask, positions, positions)
        for layer in self.encoder.layers:
            x, _ = layer(x, bias)
        x = self.encoder.finish(x)
        keys_values = [layer.cross_attention.project(x) for layer in self.decoder.layers]
        source = None
        if self.soft_copy is not None:
            source = (embedded, embedded + self.encoder.embed_positions(positions))
        return Memory(keys_values, mask, source)

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        memory: Memory,
        past: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states of the given rows, and their keys and values for a cache.

        Shapes: tokens, positions [B, T]; visible [B, 1, T, P + T] (P cached rows, at positions
        0..P-1); past: per layer keys and values [B, H, P, C] -> [B, T, D].
        """
        embedded = self.embed(tokens)
        if self.soft_copy is not None:
            embedded = self._copy_source(embedded, tokens, positions, memory)
        x = self.decoder.start(embedded, positions)
        key_positions = positions
        if past is not None and self.decoder.relative_bias is not None:
            cached = torch.arange(past[0][0].shape[2], device=tokens.device)[None]
            key_positions = torch.cat((cached.expand(tokens.shape[0], -1), positions), dim=1)
        bias = self.decoder.bias(visible, positions, key_positions)
        new = []
        for index, layer in enumerate(self.decoder.layers):
            x, keys_values = layer(
                x,
                bias,
                memory.keys_values[index],
                memory.mask,
                None if past is None else past[index],
            )
            new.append(keys_values)
        return self.decoder.finish(x), new

    def _copy_source(
        self, embedded: Tensor, tokens: Tensor, positions: Tensor, memory: Memory
    ) -> Tensor:
        """Masks become softmax(W pos (source + source pos)^T) source, as in the original code."""
        values, keys = memory.source
        scores = self.soft_copy(self.decoder.embed_positions(positions)) @ keys.transpose(1, 2)
        if memory.mask is not None:
            scores = scores.masked_fill(~memory.mask[:, 0], float("-inf"))
        copied = scores.softmax(-1) @ values
        return torch.where((tokens == self.config.mask_id)[..., None], copied, embedded)

    def logits(self, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """Scores of every token at the given rows; `previous` is the token before each prediction.

        With a coupling rank, hidden is corrected by W_o silu(W_h hidden + E_p[previous]) first.
        Shapes: hidden [..., D], previous [...] -> [..., V].
        """
        if self.config.coupling_rank:
            if previous is None:
                raise ValueError("a coupled drafter needs the token before each prediction")
            hidden = self.couple(hidden, self.coupling_hidden(hidden), previous)
        return self.project(hidden)

    def couple(self, hidden: Tensor, from_hidden: Tensor, previous: Tensor) -> Tensor:
        """The correction of one slot's hidden state by the token before it."""
        return hidden + self.coupling_out(F.silu(from_hidden + self.coupling_previous(previous)))

    def project(self, hidden: Tensor) -> Tensor:
        """Output projection, after any coupling. Shapes: [..., D] -> [..., V]."""
        if self.config.logit_scale != 1.0:
            hidden = hidden * self.config.logit_scale
        weight = (
            self.embedding.weight[: self.config.vocab_size]
            if self.output is None
            else self.output.weight
        )
        return F.linear(hidden, weight, self.logits_bias)

    def coupled_rows(self) -> Tensor:
        """What one unit of the coupling adds to each token's score. Shapes: -> [V, rank]."""
        weight = (self.output or self.embedding).weight[: self.config.vocab_size]
        return weight @ self.coupling_out.weight * self.config.logit_scale

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        rows: Rows,
        memory: Memory | None = None,
    ) -> Tensor:
        """Hidden states of all rows in one pass (training). Shapes: -> [B, T, D]."""
        if memory is None:
            memory = self.encode(input_ids, attention_mask)
        visible = rows.visible(self.config.prefix_attention == "bidirectional")
        visible = visible | (rows.block == PADDING)[:, None, :, None]  # no row without a key
        return self.decode(rows.tokens, rows.positions, visible, memory)[0]


AutoConfig.register("spec-drafter", SpecDrafterConfig)
AutoModel.register(SpecDrafterConfig, SpecDrafter)
