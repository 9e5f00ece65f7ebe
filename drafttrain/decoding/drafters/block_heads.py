"""Block heads as a drafter: the target's last hidden state drafts a block (Stern et al. 2018).

The target's row behind the last committed token has been computed already, so a draft costs no pass
of any model but the heads. Greedy decoding proposes the arg-max of every head. Under sampling each
token is drawn from its own head's row, which depends on no other drafted token, so rejection
sampling stays lossless. Nothing is drafted before the target's first row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.batching import BatchedCall, BatchedSteps
from drafttrain.decoding.drafters.slots import SlotSession
from drafttrain.decoding.engine.teacher_forcing import check_projection, project, states_before
from drafttrain.decoding.roles import Drafter, Randomness
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.block_heads import BlockHeads


class BlockHeadsDrafter(Drafter):
    """Drafts with heads on the target that decodes.

    Raises ValueError for a target whose logits are more than a projection of that state.
    """

    name = "block-heads"
    requires = TargetRequirements(layers=(-1,), first_row=True)

    def __init__(self, heads: BlockHeads, target: PreTrainedModel):
        check_projection(target)
        self.model, self.target = heads.eval(), target
        self.vocabulary: int = target.get_output_embeddings().out_features
        """Tokens that it can draft."""

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> BlockHeadsSession:
        return BlockHeadsSession(self, sampling, randomness)

    def rows_all(self, requests: Sequence[tuple[Tensor, int, int]]) -> list[tuple[Tensor, Tensor]]:
        """States and rows of heads number first..last-1 from each sequence's newest state ([1, D],
        first, last), in one product of all. Shapes: -> [heads, D], [heads, V] each."""
        first, last = min(one[1] for one in requests), max(one[2] for one in requests)
        states = self.model.each(torch.cat([newest for newest, *_ in requests]), first, last)
        own = [
            states[start - first : end - first, place]
            for place, (_, start, end) in enumerate(requests)
        ]
        logits = project(self.target, torch.cat(own)).split([len(rows) for rows in own])
        return list(zip(own, logits, strict=True))


class BlockHeadsSession(SlotSession):
    """One sequence; nothing is kept between rounds, as all is in the target's state."""

    def __init__(self, drafter: BlockHeadsDrafter, sampling: Sampling, randomness: Randomness):
        self.drafter, self.sampling, self.randomness = drafter, sampling, randomness

    def longest(self, tokens: Tensor, wanted: int, target_state: TargetState | None) -> int:
        """Where others have drafted behind the committed tokens, the later heads go on."""
        if target_state is None:
            return 0
        self._newest = target_state.hidden[-1][-1:]
        self._skipped = len(tokens) - target_state.committed
        return min(wanted, max(0, self.drafter.model.config.heads - self._skipped))

    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        request = self._newest, self._skipped, self._skipped + slots
        return (yield BatchedCall(self.drafter.rows_all, request))


@torch.inference_mode()
def predict_blocks(
    heads: BlockHeads, target: PreTrainedModel, source_ids: Tensor, target_ids: Tensor
) -> Tensor:
    """Greedy blocks at every prefix length 0..L-1 of a known output, in one pass of the target.

    At the empty prefix nothing is drafted: -1 is no token. Shapes: [S], [L] -> [L, heads].
    """
    [before] = states_before(target, [source_ids.tolist()], [target_ids.tolist()])
    logits = project(target, heads.each(before[:-1]).transpose(0, 1))
    nothing = torch.full((1, heads.config.heads), -1)
    return torch.cat((nothing, logits.argmax(-1).cpu()))
