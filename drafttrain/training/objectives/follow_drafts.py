"""A language model also learns where its own drafts lead it: on-policy distillation.

A share of the rows is continued by rounds of decoding in which it drafts; the target's rows at the
drafted prefixes teach (DistillSpec, Zhou et al. 2024, Section 3; Agarwal et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.language_recipes import FollowTargetConfig
from drafttrain.data.batches.drafted import (
    BegunRow,
    ContinueRows,
    DraftsBatch,
    OnPolicyBatch,
    lay_out_drafts,
)
from drafttrain.data.batches.packing import DocumentBatch
from drafttrain.training.losses import LossSums
from drafttrain.training.objectives.follow_target import FollowTarget
from drafttrain.training.text_rows import text_rows


class FollowDrafts(FollowTarget):
    """`FollowTarget`, and on rows that are continued the same divergences at every drafted prefix.

    A draft is no label: it has no cross entropy, and counts as neither right nor wrong. The draws
    have no gradient. continue_rows: decodes with the drafter that it is given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: FollowTargetConfig,
        target: PreTrainedModel,
        continue_rows: ContinueRows,
        draftable: Tensor | None = None,
    ):
        super().__init__(model, settings, target, draftable)
        self.continue_rows = continue_rows

    def forward(self, batch: OnPolicyBatch | DocumentBatch, progress: float) -> LossSums:
        """Of rows that are not continued as in `FollowTarget`."""
        if isinstance(batch, DocumentBatch):
            return super().forward(batch, progress)
        found = []
        if batch.whole is not None:
            found.append(super().forward(batch.whole, progress))
        if batch.begun:
            found.append(self.on_drafts(self.draft(batch.begun)))
        return LossSums(*(sum(values[1:], values[0]) for values in zip(*found, strict=True)))

    @torch.no_grad()
    def draft(self, begun: Sequence[BegunRow]) -> DraftsBatch:
        """Rounds of decoding behind some rows, with the drafter as it is and without dropout."""
        device, training = self.model.device, self.model.training
        self.model.eval()
        with torch.autocast(device.type, enabled=False):
            rounds = self.continue_rows(self.model, begun)
        self.model.train(training)
        return lay_out_drafts(begun, rounds).to(device)

    def on_drafts(self, batch: DraftsBatch) -> LossSums:
        """The divergences at every drafted prefix, all of the same weight."""
        logits = text_rows(self.model, batch, self.draftable)
        found = self.divergence(*self.compared_rows(batch, logits))
        count = torch.tensor(float(len(found)), device=found.device)
        none = torch.zeros((), dtype=torch.long, device=found.device)
        return LossSums(found.sum(), count, none, none)
