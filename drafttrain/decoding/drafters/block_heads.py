"""Block heads as a drafter: the target's last hidden state drafts a block (Stern et al. 2018).

The target has already computed the state that predicts the next token, so a draft costs only the
heads. Nothing is drafted before the target's first forward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.batching import BatchedCall, BatchedSteps
from drafttrain.decoding.drafters.slots import SlotSession
from drafttrain.decoding.engine.teacher_forcing import (
    check_projection,
    project,
    teacher_forced_states,
)
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.models.block_heads import BlockHeads


class BlockHeadsSession(SlotSession):
    """One sequence. It keeps nothing between rounds: the target's state holds all it needs."""

    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        """Most tokens to draft. After tokens drafted by others, the later heads continue."""
        if target_state is None:
            return 0
        self._newest = target_state.hidden[-1][-1:]
        self._skipped = len(tokens) - target_state.committed
        return min(most, max(0, self.drafter.model.config.heads - self._skipped))

    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        request = self._newest, self._skipped, self._skipped + slots
        return (yield BatchedCall(self.drafter.rows_all, request))


class BlockHeadsDrafter(Drafter):
    """Drafts with heads on the target.

    Raises ValueError if the target's logits are not a plain projection of its last hidden state.
    """

    name = "block-heads"
    session, correction = BlockHeadsSession, None
    requires = TargetRequirements(layers=(-1,))

    def __init__(self, heads: BlockHeads, target: PreTrainedModel):
        check_projection(target)
        self.model, self.target = heads.eval(), target
        self.vocabulary: int = target.get_output_embeddings().out_features
        """Number of tokens that it can draft."""

    def rows_all(self, requests: Sequence[tuple[Tensor, int, int]]) -> list[tuple[Tensor, Tensor]]:
        """Returns the states and logits of some heads of each sequence, projected in one call.

        Each request holds the sequence's newest hidden state [1, D], its first head, and its last
        head + 1. Shapes: -> [heads, D], [heads, V] each.
        """
        first, last = min(one[1] for one in requests), max(one[2] for one in requests)
        states = self.model.each(torch.cat([newest for newest, *_ in requests]), first, last)
        selected = [
            states[start - first : end - first, index]
            for index, (_, start, end) in enumerate(requests)
        ]
        logits = project(self.target, torch.cat(selected)).split([len(rows) for rows in selected])
        return list(zip(selected, logits, strict=True))


@torch.inference_mode()
def predict_blocks(
    heads: BlockHeads, target: PreTrainedModel, source_ids: Tensor, target_ids: Tensor
) -> Tensor:
    """Greedy blocks at every prefix length 0..L-1 of a known output, in one target forward pass.

    Nothing is drafted at the empty prefix; -1 marks a missing token. Shapes: [S], [L] ->
    [L, heads].
    """
    [states] = teacher_forced_states(target, [source_ids.tolist()], [target_ids[:-1].tolist()])
    logits = project(target, heads.each(states[:-1]).transpose(0, 1))
    nothing = torch.full((1, heads.config.heads), -1)
    return torch.cat((nothing, logits.argmax(-1).cpu()))
