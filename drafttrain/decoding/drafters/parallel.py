"""A language model that drafts a block in one forward pass (PARD, arXiv 2504.18583).

Its input is [context, last token, mask x (k - 1)], with the same mask token each time. The logits
at the last token draft the first token, those at each mask one more. Masks do not stay cached.
Greedy decoding proposes the arg-max of each row, a point mass. Under sampling, each token is drawn
from its own row. The rows depend on the committed tokens only, so rejection sampling stays
lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from drafttrain.decoding.batching import BatchedCall, BatchedSteps
from drafttrain.decoding.drafters.causal import CausalDrafter, DrafterSequence
from drafttrain.decoding.drafters.slots import SlotSession
from drafttrain.decoding.engine.requests import ForwardOutput, ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Sampling, Source


class ParallelDrafter(CausalDrafter):
    """Drafts blocks with a decoder-only language model that has `pard_token` in its config.json."""

    name = "parallel"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> ParallelSession:
        """Opens a session. Raises ValueError for a source longer than the drafter's positions."""
        return ParallelSession(self, DrafterSequence(self.model, source), sampling, randomness)

    @without_gradients
    def blocks_all(
        self, requests: Sequence[tuple[SequenceState, Tensor, int]]
    ) -> list[ForwardOutput]:
        """Computes logits and hidden states of K slots after each sequence's committed tokens, in
        shared calls.

        Tokens that are not cached yet are computed together with the masks. Only the tokens stay
        cached. Shapes: tokens [T] each, slots K -> logits [K, V], hidden [F, D] of all F computed
        tokens, the slots last.
        """
        mask = self.model.model.config.pard_token
        batch = [
            ForwardRequest(state, state.align(tokens) + [mask] * (slots - 1), slots)
            for state, tokens, slots in requests
        ]
        outputs = self.model.forward_batch(batch)
        for state, tokens, _ in requests:
            state.settle(len(tokens))
        return outputs


class ParallelSession(SlotSession):
    """One sequence. The committed tokens stay cached, masks do not."""

    def __init__(
        self,
        drafter: ParallelDrafter,
        sequence: DrafterSequence,
        sampling: Sampling,
        randomness: Randomness,
    ) -> None:
        self.drafter, self.sequence = drafter, sequence
        self.sampling, self.randomness = sampling, randomness

    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        return self.sequence.longest(most, len(tokens))

    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        state = yield from self.sequence.begin()
        score = yield BatchedCall(self.drafter.blocks_all, (state, tokens, slots))
        return score.hidden[-slots:], score.logits
