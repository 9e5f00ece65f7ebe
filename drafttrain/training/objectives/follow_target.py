"""Training of a drafter from the target's outputs and from its distributions (distillation).

The target runs on every batch, unless the batch contains its distributions, reduced to the
likeliest tokens (`merged_rows`). Only output tokens are in the loss, since only these are
drafted. In batches of masked blocks (PARD, arXiv 2504.18583), every token of a block is a separate
next-token task; its label distribution is the target's for the token at the same position in the
text, conditioned on all the text before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.config.recipes import FollowTargetConfig
from drafttrain.data.batches.examples import causal_mask, merged_rows
from drafttrain.data.batches.masked_blocks import BlocksBatch
from drafttrain.decoding.engine.architectures import attention_windows, layer_masks, unwrapped
from drafttrain.decoding.engine.teacher_forcing import projection_scale
from drafttrain.decoding.sampling import at_least_float32
from drafttrain.models.draftable import draftable_indices
from drafttrain.models.language_models import takes_positions
from drafttrain.models.spec_drafter.layout import IGNORED
from drafttrain.training.losses import DIVERGENCES, LossSums, overlap, token_sums
from drafttrain.training.objective import Teacher


class FollowTarget(nn.Module):
    """The weighted sum of divergences of the drafter's distribution q from the target's
    (`FollowTargetConfig`), at every token of the target's output.

    draftable [C]: the tokens that the drafter can draft, ascending; q is over these only. Any other
    output token counts as a miss and has no cross entropy in validation.
    """

    parts = None

    def __init__(
        self,
        model: PreTrainedModel,
        settings: FollowTargetConfig,
        target: PreTrainedModel,
        draftable: Tensor | None = None,
    ):
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # FSDP gathers these one at a time
        weights = {name: getattr(settings, name) for name in DIVERGENCES}
        self.divergences = {name: weight for name, weight in weights.items() if weight}
        self.teacher = Teacher(target)
        self.register_buffer("draftable", draftable, persistent=False)

    def forward(self, batch: BlocksBatch, progress: float) -> LossSums:
        """Returns the sums of a batch. In eval mode the loss is the cross entropy of the output."""
        logits, labels = self.rows(batch)
        divergence = None
        if self.training:
            rows = self.compared_rows(batch, logits)
            divergence = sum(w * DIVERGENCES[name](*rows) for name, w in self.divergences.items())
        return token_sums(logits, self.draftable_index(labels), divergence)

    def rows(self, batch: BlocksBatch) -> tuple[Tensor, Tensor]:
        """Returns the drafter's logits [N, C] over its draftable tokens at every labelled position,
        and the labels [N], ids of the target's vocabulary."""
        logits = text_rows(self.model, batch, self.draftable)
        return logits, batch.at_labels(batch.labels)

    def draftable_index(self, labels: Tensor) -> Tensor:
        """Returns the index of each token among the draftable ones, else IGNORED. Shapes: [N]."""
        return draftable_indices(labels, self.draftable, IGNORED)

    def tokens(self, indices: Tensor) -> Tensor:
        """Returns the vocabulary's ids of tokens from their indices among the draftable ones."""
        return indices if self.draftable is None else self.draftable[indices]

    def compared_rows(self, batch: BlocksBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of target and drafter over the same M outcomes at every label:
        all draftable tokens, or, if the batch has the target's rows, the likeliest tokens and all
        others as one (`merged_rows`). Shapes: logits [N, C] -> [N, M] both."""
        draft = at_least_float32(logits).log_softmax(-1)
        if batch.likeliest is None:
            return self.target_log_probs(batch), draft
        same = batch.same_in_text()
        tokens, target = batch.likeliest[same], batch.log_probs[same]
        merge = target.shape[1] > tokens.shape[1]
        return target.to(draft.dtype), merged_rows(draft, self.draftable_index(tokens), merge)

    @torch.no_grad()
    def target_log_probs(self, batch: BlocksBatch) -> Tensor:
        """Returns the target's log-probabilities of the draftable tokens at labels. [N, C]"""
        logits = text_rows(self.teacher.on(batch.input_ids.device), batch.text)
        return self.of_draftable(logits)[batch.same_in_text()]

    def of_draftable(self, logits: Tensor) -> Tensor:
        """Returns the log-probabilities of draftable tokens from the target's logits. [N, C]"""
        rows = at_least_float32(logits).log_softmax(-1)
        return rows if self.draftable is None else rows[:, self.draftable]

    @torch.no_grad()
    def overlap(self, batch: BlocksBatch, logits: Tensor) -> Tensor:
        """Returns the acceptance probability of a token drawn from the drafter at every label,
        without warping. Shapes: logits [N, C] of `rows` -> [N]."""
        return overlap(self.target_log_probs(batch).exp(), at_least_float32(logits).softmax(-1))


def text_inputs(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Tensor | None = None
) -> dict[str, Tensor | dict[str, Tensor]]:
    """Returns the arguments of a decoder-only model's forward, with its attention windows.

    mask: additive, [B, 1, T, T]; None: one text per row, padded on the right. Shapes: ids and
    positions [B, T].
    """
    if mask is None and not takes_positions(type(unwrapped(model)), model.config):
        return {"input_ids": ids}  # its own causal mask, at the cost of a device synchronisation
    mask = causal_mask(ids, model.dtype) if mask is None else mask
    mask = layer_masks(attention_windows(model.config), mask, positions, positions)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def text_rows(model: PreTrainedModel, batch: BlocksBatch, wanted: Tensor | None = None) -> Tensor:
    """Returns a decoder-only model's logits at every labelled position, of all or `wanted` tokens.

    If logits are a projection of the last hidden state, only labelled positions are projected: the
    projection dominates a shallow model's time. Shapes: wanted [C] -> [N, V], or [N, C].
    """
    scale, mask = projection_scale(model), batch.mask(model.dtype)
    inputs = text_inputs(model, batch.input_ids, batch.positions, mask) | {"use_cache": False}
    if scale is None:
        logits = batch.at_labels(model(**inputs).logits)
        return logits if wanted is None else logits[:, wanted]
    hidden = batch.at_labels(model.get_decoder()(**inputs)[0])
    output = model.get_output_embeddings()
    hidden = hidden if scale == 1.0 else hidden * scale
    if wanted is None:
        return output(hidden)
    bias = None if output.bias is None else output.bias[wanted]
    return F.linear(hidden, output.weight[wanted], bias)
