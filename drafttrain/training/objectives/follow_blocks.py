"""A language model learns to fill in masks as its target would go on: PARD (arXiv 2504.18583).

Every token of every block is a next-token task of its own, learned from what `FollowTarget` learns
from: the output's token and the target's row there, which knows the text before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.data.batches.masked_blocks import BlocksBatch
from drafttrain.training.objectives.follow_target import FollowTarget


class FollowInBlocks(FollowTarget):
    """`FollowTarget` at every labelled position of texts and masks."""

    @torch.no_grad()
    def target_log_probs(self, batch: BlocksBatch) -> Tensor:
        """The target's row at every labelled position, as far as it can be drafted. [N, C]"""
        return super().target_log_probs(batch.text)[batch.same_in_text()]

    def known_rows(self, batch: BlocksBatch) -> tuple[Tensor, Tensor]:
        """`TopRows` at every labelled position: those of the text's token with the same label."""
        same = batch.same_in_text()
        return batch.likeliest[same], batch.log_probs[same]
