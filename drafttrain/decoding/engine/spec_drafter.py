"""A Spec-Drafter's decoder on rows of known outputs, for training, validation and analyses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from drafttrain.decoding.engine.architectures import position_limit
from drafttrain.decoding.engine.cache import cached_tensors
from drafttrain.decoding.engine.forward import ForwardBatch, TransformersBody, filled_cache
from drafttrain.models.spec_drafter.layout import Rows
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.pooling import group_means


@dataclass(frozen=True)
class EncoderStates:
    """Encoder states that the decoder's cross-attention reads."""

    states: Tensor
    """[B, S, D]"""
    mask: Tensor | None
    """[B, S] bool, false for padding; None: no padding."""


@dataclass(frozen=True)
class DecodedRows:
    """Decoder rows with their hidden states and, for a prefix that blocks attend to, its cache."""

    rows: Rows
    hidden: Tensor
    """[B, T, D]"""
    self_attention: Sequence[Tensor]
    """Keys and values of each layer in turn; empty if they are not kept."""
    cross_attention: Sequence[Tensor]
    """Keys and values of each layer in turn; empty if they are not kept."""


class RowReader:
    """Runs a Spec-Drafter's decoder on rows, with gradients."""

    def __init__(self, model: SpecDrafter) -> None:
        self.model, self._body = model, TransformersBody(model)
        self._limit = position_limit(model.config)

    def encode(self, source: Tensor, mask: Tensor | None) -> EncoderStates:
        """Runs the drafter's own encoder, or pools the target's encoder states.

        Shapes: source [B, S] token ids, or [B, S, E] states of any dtype; mask [B, S] (1 = token;
        None: no padding).
        """
        if self.model.shape.encoder == "own":
            encoder = self.model.get_encoder()
            return EncoderStates(encoder(input_ids=source, attention_mask=mask)[0], mask)
        states, size = source.to(self.model.dtype), self.model.shape.source_pooling
        return EncoderStates(*group_means(states, size, None if mask is None else mask.bool()))

    def __call__(
        self,
        rows: Rows,
        encoded: EncoderStates,
        prefix: DecodedRows | None = None,
        keep: bool = False,
    ) -> DecodedRows:
        """Computes the hidden states of rows, which also attend to `prefix` if it is given.

        A causal prefix can be computed once (`keep`) for several passes over its blocks.
        """
        if self._limit is not None:  # slots past the last position have no labels
            rows = replace(rows, positions=rows.positions.clamp(max=self._limit - 1))
        before, cache, keys = None, None, rows.positions
        if prefix is not None:
            before = prefix.rows
            cached = (prefix.self_attention, prefix.cross_attention)
            cache = EncoderDecoderCache(*map(filled_cache, cached))
            keys = torch.cat((before.positions, keys), dim=1)
        elif keep:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        call = ForwardBatch(
            ids=rows.tokens,
            positions=rows.positions,
            visible=rows.visible(self.model.shape, before),
            key_positions=keys,
            cache=cache,
            source_mask=encoded.mask,
            encoded=encoded.states,
        )
        hidden = self._body.run_decoder(call)
        if not keep:
            return DecodedRows(rows, hidden, (), ())
        kept = map(cached_tensors, (cache.self_attention_cache, cache.cross_attention_cache))
        return DecodedRows(rows, hidden, *kept)
