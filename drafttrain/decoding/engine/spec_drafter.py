"""How the decoder of a Spec-Drafter is called."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from drafttrain.decoding.engine.cache import KeysValues
from drafttrain.decoding.engine.forward import BatchedCall, CallOutput, version_of
from drafttrain.models.spec_drafter.model import OutputRows, SpecDrafter
from drafttrain.models.spec_drafter.pooling import group_means
from drafttrain.models.spec_drafter.rows import Memory


class SpecDrafterBody:
    """`SpecDrafter.decode` over the engine's cache. Sources are read before the first call."""

    cross_attends = masks_sources = True

    def __init__(self, model: SpecDrafter) -> None:
        self.model, self.device, self.modules = model, model.device, [model]
        self.needs_key_positions = model.config.positions == "relative"
        self._rows_of: list[tuple[int, int]] | None = None
        self._rows: OutputRows | None = None
        self._own_slots = model.config.slot_weights == "own"

    def cross(self, encoded: Tensor) -> list[KeysValues]:
        """Keys and values of cross-attention, two [heads, S, head_dim] a layer, of what an encoder
        put out [S, E]."""
        states = group_means(encoded, self.model.config.source_pooling)
        states = states.to(self.model.dtype)[None]
        both = [layer.cross_attention.project(states) for layer in self.model.decoder.layers]
        return [(keys[0], values[0]) for keys, values in both]

    def prepared(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        weight, bias = self.model.output_weight(), self.model.logits_bias
        now = [version_of(one) for one in (weight, bias) if one is not None]
        if now != self._rows_of:  # to choose them takes as long as a layer
            self._rows_of, self._rows = now, self.model.output_rows()
        return nullcontext()

    def compute(self, call: BatchedCall) -> CallOutput:
        model, config = self.model, self.model.config
        source_mask = None if call.source_mask is None else call.source_mask[:, None, None]
        extend = [
            partial(call.cache.update, layer_idx=layer) for layer in range(config.decoder_layers)
        ]
        rows = config.embedding_rows
        slots = False
        if self._own_slots:
            slots = (call.ids == config.mask_id) | (call.ids >= rows)
        hidden, _ = model.decode(
            call.ids % rows,
            call.positions,
            call.visible[:, None],
            Memory(call.sources, source_mask),
            extend,
            slots,
            call.states,
            call.has_states,
            call.key_positions,
        )
        scored = hidden if call.scored is None else hidden[:, call.scored]
        logits = model.project(scored, self._rows)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return CallOutput(logits, hidden)
