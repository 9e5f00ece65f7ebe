"""A Spec-Drafter's decoder on rows of known outputs: in training, validation and analyses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from drafttrain.decoding.engine.architectures import position_limit
from drafttrain.decoding.engine.cache import KeysValues
from drafttrain.decoding.engine.forward import ForwardBatch, TransformersBody, filled
from drafttrain.models.spec_drafter.layout import Rows
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.pooling import group_means


@dataclass(frozen=True)
class Encoded:
    """What the decoder's cross-attention reads."""

    states: Tensor
    """[B, S, D]"""
    mask: Tensor | None
    """[B, S] true where a state is; None: everywhere."""


@dataclass(frozen=True)
class Read:
    """Rows that have been read; those of a causal prefix are seen by the blocks after it."""

    rows: Rows
    hidden: Tensor
    """[B, T, D]"""
    own: Sequence[KeysValues]
    """Keys and values of self-attention, a pair a layer; none where they are not kept."""
    crossed: Sequence[KeysValues]
    """Those of cross-attention."""


class RowReader:
    """Reads rows with a Spec-Drafter's decoder, with gradients."""

    def __init__(self, model: SpecDrafter) -> None:
        self.model, self._body = model, TransformersBody(model)
        self._limit = position_limit(model.config)

    def encode(self, source: Tensor, mask: Tensor | None) -> Encoded:
        """Its own encoder, or the target's encoder states as it reads them.

        Shapes: source [B, S] token ids, or [B, S, E] states of any type; mask [B, S] (1 = there).
        """
        if self.model.shape.encoder == "own":
            return Encoded(self.model.get_encoder()(input_ids=source, attention_mask=mask)[0], mask)
        states, size = source.to(self.model.dtype), self.model.shape.source_pooling
        return Encoded(*group_means(states, size, None if mask is None else mask.bool()))

    def __call__(
        self,
        rows: Rows,
        encoded: Encoded,
        prefix: Read | None = None,
        states: Tensor | None = None,
        keep: bool = False,
    ) -> Read:
        """Hidden states of rows that also see the prefix read before.

        A causal prefix sees no block, so it can be read once (`keep`) for several passes over its
        blocks. states [B, L, E]: the target's hidden states that the tokens of the first L rows
        were predicted from, zeros where there is none.
        """
        if self._limit is not None:  # slots past the end of a long output predict nothing
            rows = replace(rows, positions=rows.positions.clamp(max=self._limit - 1))
        before, cache, keys = None, None, rows.positions
        if prefix is not None:
            before = prefix.rows
            cache = EncoderDecoderCache(filled(prefix.own), filled(prefix.crossed))
            keys = torch.cat((before.positions, keys), dim=1)
        elif keep:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        call = ForwardBatch(
            ids=rows.tokens,
            positions=rows.positions,
            visible=rows.visible(self.model.shape, before),
            key_positions=keys,
            scored=None,
            cache=cache,
            source_mask=encoded.mask,
            encoded=encoded.states,
            states=states,
        )
        hidden = self._body.run_decoder(call)
        if not keep:
            return Read(rows, hidden, (), ())
        own, crossed = cache.self_attention_cache, cache.cross_attention_cache
        return Read(rows, hidden, *([(x.keys, x.values) for x in y.layers] for y in (own, crossed)))
