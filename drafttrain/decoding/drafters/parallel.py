"""A language model that drafts a block in one forward pass (PARD, arXiv 2504.18583).

Its input is [context, last token, mask x (k - 1)], with the same mask token each time. The logits
at the last token draft the first token, those at each mask one more.
"""

from torch import Tensor

from drafttrain.decoding.batching import BatchedCall, BatchedSteps
from drafttrain.decoding.drafters.causal import CausalDrafter, DrafterSequence
from drafttrain.decoding.drafters.slots import SlotSession
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Sampling, Source


class ParallelSession(SlotSession):
    """One sequence. The committed tokens stay cached, masks do not."""

    def __init__(
        self, drafter: CausalDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        super().__init__(drafter, source, sampling, randomness)
        self.sequence = DrafterSequence(drafter.model, source)

    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        return self.sequence.longest(tokens, most)

    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        model, state = self.drafter.model, (yield from self.sequence.begin())
        masks = [model.model.config.pard_token] * (slots - 1)
        request = ForwardRequest(state, state.align(tokens) + masks, logits_to_keep=slots)
        score = yield BatchedCall(model.forward_batch, request)
        state.settle(len(tokens))
        return score.hidden[-slots:], score.logits


class ParallelDrafter(CausalDrafter):
    """Drafts blocks with a decoder-only language model that has `pard_token` in its config.json."""

    name = "parallel"
    session, correction = ParallelSession, None
