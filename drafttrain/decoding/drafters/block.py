"""Spec-Drafter as a drafter: one forward pass drafts a whole block (SpecDec Equation 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.batching import BatchedCall, BatchedSteps
from drafttrain.decoding.drafters.candidates import PreviousTokenCorrection
from drafttrain.decoding.drafters.slots import SlotSession, longest_draft
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.encoding import given_encoding
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import check_length
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.roles import Drafter, Randomness
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.pooling import group_means


class BlockSession(SlotSession):
    """One sequence: the encoded source and, with a causal prefix, the prefix's KV cache."""

    def __init__(
        self, drafter: BlockDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        super().__init__(drafter, source, sampling, randomness)
        if drafter.model.shape.encoder == "own":
            check_length(len(source.input_ids), drafter.cached.source_limit)

    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        return longest_draft(most, self.drafter.cached.position_limit, len(tokens))

    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        """Mask tokens attend to the prefix and to each other. The first slot of an anchored drafter
        is the row of the last prefix token. Only the prefix stays cached."""
        if self.state is None:
            self.state = yield BatchedCall(self.drafter.encode_all, self.source)
        shape, state = self.drafter.model.shape, self.state
        prefix = tokens if shape.anchored else tokens[1:]  # paper slots: no start token
        if shape.bidirectional:
            state.forget(0)
        missing = state.align(prefix) if len(prefix) else []
        ids = missing + [shape.mask_id] * (slots - 1 if shape.anchored else slots)
        visible = np.ones((len(ids), state.cached + len(ids)), dtype=bool)
        if not shape.bidirectional:
            for row in range(len(missing)):
                visible[row, state.cached + row + 1 :] = False
        request = ForwardRequest(state, ids, slots, torch.from_numpy(visible))
        output = yield BatchedCall(self.drafter.cached.forward_batch, request)
        state.settle(len(prefix))
        return output.hidden[-slots:], output.logits


class BlockDrafter(Drafter):
    """Drafts blocks of slots with a trained Spec-Drafter."""

    name = "spec-drafter"
    session = BlockSession

    def __init__(self, model: SpecDrafter, target: PreTrainedModel | None = None):
        self.model = model.eval()
        shape = model.shape
        self.cached = CachedModel(model, model.draftable, shape.vocab_size)
        self.cached.check_tree_attention()
        self.requires = TargetRequirements(encoder=shape.encoder == "target")
        self.correction = None if model.previous_token is None else make_correction(model)
        self.eos_ids, self.vocabulary = self.cached.eos_ids, self.cached.vocabulary

    @without_gradients
    def encode_all(self, sources: Sequence[Source]) -> list[SequenceState]:
        """Returns states with empty caches. Encodes the sources, or reads the target's states."""
        encoded: list[Tensor | None] = [None] * len(sources)
        if self.model.shape.encoder == "target":
            pooling, dtype = self.model.shape.source_pooling, self.model.dtype
            encoded = [group_means(one.to(dtype), pooling)[0] for one in given_encoding(sources)]
        own = zip(sources, encoded, strict=True)
        return self.cached.engine.begin([replace(one, encoded=states) for one, states in own])


@torch.inference_mode()
def make_correction(model: SpecDrafter) -> PreviousTokenCorrection:
    """Computes the previous-token features of every token of a Spec-Drafter."""
    every = torch.arange(model.shape.vocab_size, device=model.device)
    features = model.previous_token.features(model.embed_tokens(every))
    return PreviousTokenCorrection(
        model.previous_token.hidden, model.previous_token_rows(), features
    )
