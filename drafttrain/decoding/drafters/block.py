"""Spec-Drafter as a drafter: one forward pass drafts a whole block (SpecDec Equation 7).

Greedy decoding proposes the arg-max of each slot, a point mass. Under sampling, each token is drawn
from the distribution of its own slot, so rejection sampling stays lossless. With previous-token
features, the distribution of slot i also depends on the token drawn for slot i - 1, and the token
of slot i is drawn from exactly that distribution.

A drafter that fuses the target's hidden states (`StateFusion`) reads the states that committed
tokens were predicted from. These states depend on committed tokens only, so decoding stays
lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.batching import BatchedCall, BatchedSteps
from drafttrain.decoding.drafters.candidates import PreviousTokenCorrection
from drafttrain.decoding.drafters.slots import SlotSession
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
from drafttrain.models.spec_drafter.shape import DraftShape

BlockOutput = tuple[Tensor, Tensor]
"""Hidden states [slots, D] and logits before previous-token features [slots, V]."""


class BlockDrafter(Drafter):
    """Drafts blocks of slots with a trained Spec-Drafter."""

    name = "spec-drafter"

    def __init__(self, model: SpecDrafter, target: PreTrainedModel | None = None):
        self.model = model.eval()
        shape = model.shape
        self.cached = CachedModel(model, model.draftable, shape.vocab_size)
        self.cached.check_tree_attention()
        self.position_limit = self.cached.position_limit
        self.fuses = model.fusion is not None
        width = getattr(model.config, "state_width", None) or 0
        self.no_states = CommittedStates(0, torch.empty(0, width, device=model.device))
        """For sequences without committed tokens yet."""
        self.requires = TargetRequirements(
            layers=(-1,) if self.fuses else (), encoder=shape.encoder == "target"
        )
        self.correction = None if model.previous_token is None else make_correction(model)
        self.eos_ids, self.vocabulary = self.cached.eos_ids, self.cached.vocabulary

    @without_gradients
    def encode_all(self, sources: Sequence[Source]) -> list[SequenceState]:
        """Returns states with empty caches. Encodes the sources, unless the drafter reads the
        target's encoder states."""
        shape = self.model.shape
        return self.cached.engine.begin([self._own_source(source, shape) for source in sources])

    def _own_source(self, source: Source, shape: DraftShape) -> Source:
        encoded = None
        if shape.encoder == "target":
            [encoded] = given_encoding([source])
            encoded, _ = group_means(encoded.to(self.model.dtype), shape.source_pooling)
        return replace(source, encoded=encoded)

    def slots_all(
        self, requests: Sequence[tuple[SequenceState, Tensor, int, CommittedStates | None]]
    ) -> list[BlockOutput]:
        """Computes the slots of several sequences in shared calls.

        Each request holds the sequence's state, the tokens of its prefix [P], the number of mask
        tokens after the prefix, and the target's hidden states. The first slot of an anchored
        drafter is the row of the last prefix token.

        Mask tokens attend to the prefix and to each other (causal slots: only to earlier masks).
        Only the prefix stays cached.
        """
        shape, batch = self.model.shape, []
        causal_slots, first = shape.slot_attention == "causal", 1 if shape.anchored else 0
        for state, prefix, masks, committed in requests:
            if shape.bidirectional:
                state.forget(0)
            missing = state.align(prefix) if len(prefix) else []
            ids = missing + [shape.mask_id] * masks
            visible = np.ones((len(ids), state.cached + len(ids)), dtype=bool)
            if not shape.bidirectional:
                for row in range(len(ids) if causal_slots else len(missing)):
                    visible[row, state.cached + row + 1 :] = False
            states = None
            if self.fuses:
                states = (committed or self.no_states).at(state.cached, len(prefix))
            batch.append(
                ForwardRequest(state, ids, masks + first, torch.from_numpy(visible), states=states)
            )
        outputs = self.cached.forward_batch(batch)
        for state, prefix, *_ in requests:
            state.settle(len(prefix))
        return [(output.hidden[-len(output.logits) :], output.logits) for output in outputs]

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> BlockSession:
        return BlockSession(self, source, sampling, randomness)


@dataclass(frozen=True)
class CommittedStates:
    """Target hidden states that the tokens committed since the last round were predicted from."""

    first: int
    """Position of the first of these tokens, counted from the start of the decoder prefix."""
    states: Tensor
    """[R, E]"""

    @staticmethod
    def of(target_state: TargetState, given: int) -> CommittedStates:
        """Takes the states from a target state, without those of the first `given` tokens, which
        decoding starts from."""
        states, end = target_state.hidden[-1], target_state.committed
        first = max(end - len(states), given)
        return CommittedStates(first, states[len(states) - (end - first) :])

    def at(self, start: int, end: int) -> Tensor:
        """Returns the states of the tokens at positions start..end-1, zeros for unknown ones:
        earlier tokens, and later tokens of other drafters. Shapes: -> [end - start, E]."""
        known = self.states[max(start - self.first, 0) : max(end - self.first, 0)]
        before = min(max(self.first - start, 0), end - start)
        return F.pad(known, (0, 0, before, end - start - before - len(known)))


class BlockSession(SlotSession):
    """One sequence: the encoded source and, with a causal prefix, the prefix's KV cache."""

    def __init__(
        self, drafter: BlockDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ):
        self.drafter, self.model, self.correction = drafter, drafter.model, drafter.correction
        self.sampling, self.randomness = sampling, randomness
        shape = drafter.model.shape
        self.anchored = shape.anchored
        self.skipped = 0 if self.anchored else 1  # paper slots: no start token
        if shape.encoder == "own":
            check_length(len(source.input_ids), drafter.cached.source_limit)
        self._source = source
        self.state: SequenceState | None = None
        self._committed: CommittedStates | None = None
        self._verified = len(source.prefix)
        """Length of the prefix whose target states are known, or will never be known."""
        self._settled = 0
        """Length of the prefix that is cached together with its target states."""

    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        if self.drafter.fuses and target_state is not None:
            self._committed = CommittedStates.of(target_state, len(self._source.prefix))
            self._verified = target_state.committed
        limit = self.drafter.position_limit  # the last slot's token is never fed
        return most if limit is None else max(0, min(most, limit + 1 - len(tokens)))

    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[BlockOutput]:
        if self.state is None:
            self.state = yield BatchedCall(self.drafter.encode_all, self._source)
        if self.drafter.fuses:  # recompute tokens that were cached without target states
            self.state.forget(min(self.state.cached, self._settled))
            self._settled = min(self._verified, len(tokens))
        masks = slots - 1 if self.anchored else slots
        request = self.state, tokens[self.skipped :], masks, self._committed
        return (yield BatchedCall(self.drafter.slots_all, request))


@torch.inference_mode()
def make_correction(model: SpecDrafter) -> PreviousTokenCorrection:
    """Computes the previous-token features of every token of a Spec-Drafter."""
    every = torch.arange(model.shape.vocab_size, device=model.device)
    features = model.previous_token.features(model.embed_tokens(every))
    return PreviousTokenCorrection(
        model.previous_token.hidden, model.previous_token_rows(), features
    )
