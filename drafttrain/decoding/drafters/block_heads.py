"""Block heads as a drafter: the target's last hidden state drafts a block (Stern et al. 2018).

The target's row behind the last committed token has been computed already, so a draft costs no pass
of any model but the heads. Greedy decoding proposes the arg-max of every head. Under sampling each
token is drawn from its own head's row, which depends on no other drafted token, so rejection
sampling stays lossless. Nothing is drafted before the target's first row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.kinds import DrawKind, Evidence
from drafttrain.decoding.drafters.block import slots_to_draft
from drafttrain.decoding.drafters.row_by_row import RowByRow
from drafttrain.decoding.engine.architectures import check_projection
from drafttrain.decoding.engine.teacher_forcing import project, states_before
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import Proposal, Sampling, Source
from drafttrain.models.block_heads import BlockHeads


class BlockHeadsDrafter:
    """Drafts with heads on the target that decodes.

    Raises ValueError for a target whose output projection is not known.
    """

    name = "block-heads"
    provides: frozenset[Evidence] = frozenset({"logits"})
    requires = TargetRequirements(layers=(-1,))
    branches = False

    def __init__(self, heads: BlockHeads, target: PreTrainedModel):
        check_projection(target.config)
        self.model, self.target = heads.eval(), target

    @property
    def vocabulary(self) -> int:
        """Tokens that it can draft."""
        return self.target.get_output_embeddings().out_features

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic" if sampling.greedy else "iid"

    def start(self, sampling: Sampling) -> RowByRow:
        return RowByRow(self, sampling)

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> BlockHeadsSession:
        return BlockHeadsSession(self, sampling, randomness)


class BlockHeadsSession:
    """One sequence; nothing is kept between rounds, as all is in the target's state."""

    def __init__(self, drafter: BlockHeadsDrafter, sampling: Sampling, randomness: Randomness):
        self.drafter, self.sampling, self.randomness = drafter, sampling, randomness

    @torch.inference_mode()
    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        """Where others have drafted behind the committed tokens, the later heads go on."""
        if target_state is None:
            return Proposal.empty()
        logits = self._rows(target_state, len(tokens) - target_state.committed, stop.longest)
        logits = logits[: slots_to_draft(stop, logits)]
        if len(logits) == 0:
            return Proposal.empty()
        rows = logits.unbind()
        if self.sampling.greedy:
            return Proposal.chain(logits.argmax(-1).cpu(), logits=rows)
        probs = warp(logits, self.sampling)
        return Proposal.chain(self.randomness.categorical(probs).cpu(), probs, logits=rows)

    def _rows(self, target_state: TargetState, skipped: int, most: int) -> Tensor:
        """Rows of the heads behind the first `skipped`. Shapes: -> [N, V], N <= most."""
        drafter, last = self.drafter, skipped + most
        newest = target_state.hidden[-1][-1:]
        return head_logits(drafter.target, drafter.model.each(newest, skipped, last)[:, 0])


def head_logits(target: PreTrainedModel, states: Tensor) -> Tensor:
    """What heads say, float32 at least. Shapes: [..., D] -> [..., V]."""
    logits = project(target, states.to(target.dtype))
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


@torch.inference_mode()
def predict_blocks(
    heads: BlockHeads, target: PreTrainedModel, source_ids: Tensor, target_ids: Tensor
) -> Tensor:
    """Greedy blocks at every prefix length 0..L-1 of a known output, in one pass of the target.

    At the empty prefix nothing is drafted: -1 is no token. Shapes: [S], [L] -> [L, heads].
    """
    [before] = states_before(target, [source_ids.tolist()], [target_ids.tolist()])
    logits = head_logits(target, heads.each(before[:-1]).transpose(0, 1))
    nothing = torch.full((1, heads.config.heads), -1)
    return torch.cat((nothing, logits.argmax(-1).cpu()))


def open_drafter(model: BlockHeads, target: PreTrainedModel | None) -> BlockHeadsDrafter:
    """What the kind's row opens it with; heads draft on a target only."""
    assert target is not None
    return BlockHeadsDrafter(model, target)
