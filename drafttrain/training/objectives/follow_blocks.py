"""A language model learns to fill in masks as its target would go on: PARD (arXiv 2504.18583).

Every token of every block is a next-token task of its own, learned from what `FollowTarget` learns
from: the output's token and the target's row there, which knows the text before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.language_recipes import FollowInBlocksConfig
from drafttrain.data.batches.masked_blocks import BlocksBatch
from drafttrain.decoding.sampling import exact_enough
from drafttrain.models.spec_drafter.slots import IGNORED
from drafttrain.training.objectives.follow_target import FollowTarget


class FollowInBlocks(FollowTarget):
    """`FollowTarget` at every labelled position of texts and masks; the target reads texts alone.

    settings.acceptance_weight: a token weighs the probability that the tokens before it in its
    block are accepted, as `reached` has it, without gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: FollowInBlocksConfig,
        target: PreTrainedModel | None = None,
        draftable: Tensor | None = None,
    ):
        super().__init__(model, settings, target, draftable)
        self.acceptance_weight = settings.acceptance_weight

    @torch.no_grad()
    def target_log_probs(self, batch: BlocksBatch) -> Tensor:
        """The target's row at every labelled position, as far as it can be drafted. [N, C]"""
        return super().target_log_probs(batch.text)[batch.same_in_text()]

    def known_rows(self, batch: BlocksBatch) -> tuple[Tensor, Tensor]:
        """`TopRows` at every labelled position: those of the text's token with the same label."""
        same = batch.same_in_text()
        return batch.likeliest[same], batch.log_probs[same]

    @torch.no_grad()
    def weights(self, batch: BlocksBatch, logits: Tensor, places: Tensor) -> Tensor:
        """What the loss at every labelled position weighs: how often it is reached.
        [N, C], [N] -> [N]."""
        if not self.acceptance_weight:
            return super().weights(batch, logits, places)
        given = exact_enough(logits).softmax(-1).gather(1, places.clamp(min=0)[:, None])[:, 0]
        return reached(batch, torch.where(places == IGNORED, 0.0, given))


def reached(batch: BlocksBatch, given: Tensor) -> Tensor:
    """The product, over the tokens before it in its block, of the probabilities that the drafter
    gives the output's own tokens there: how often a token is reached where the target is sure.

    1 for the first token of a block. Shapes: given [N], of each labelled position -> [N].
    """
    counted = batch.labels != IGNORED
    one = given.new_ones(counted.shape)
    own, found = one.masked_scatter(counted, given), one
    later, before = batch.before >= 0, batch.before.clamp(min=0)
    for _ in range(int(batch.slots().max())):
        found = torch.where(later, (own * found).gather(1, before), one)
    return found[counted]
