"""Training of a state drafter to follow its target, reading the target's states.

Blocks as in `BlocksCollator`. The target runs on every batch; the drafter attends to the target's
keys and values and reads its hidden states. The target's logits come from the same forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.recipes import FollowInBlocksConfig
from drafttrain.data.batches.masked_blocks import BlocksBatch
from drafttrain.decoding.sampling import exact_enough
from drafttrain.models.spec_drafter.layout import IGNORED
from drafttrain.models.state_drafter import Reading, StateDrafter, read_target
from drafttrain.training.objectives.follow_target import FollowTarget


@dataclass(frozen=True)
class Columns:
    """Selected columns of each sequence of a batch, padded to the same number N."""

    places: Tensor
    """[B, N] column indices, ascending; arbitrary in the padding."""
    there: Tensor
    """[B, N] false in the padding."""

    @staticmethod
    def where(wanted: Tensor, most: int) -> Columns:
        """Selects the true columns of `wanted` [B, T]; most: their maximal number, at least 1."""
        places = wanted.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        return Columns(places, wanted.gather(1, places))


class FollowStates(FollowTarget):
    """`FollowTarget` for a drafter that reads its target's states.

    Its batches come from `BlocksCollator` with reads_prompt=False.
    """

    model: StateDrafter

    def __init__(
        self,
        model: StateDrafter,
        settings: FollowInBlocksConfig,
        target: PreTrainedModel,
        draftable: Tensor | None = None,
    ):
        super().__init__(model, settings, target, draftable)
        self._read: tuple[BlocksBatch, Reading] | None = None

    def rows(self, batch: BlocksBatch) -> tuple[Tensor, Tensor]:
        """Returns the drafter's logits [N, C] over its draftable tokens at every labelled position,
        and the labels [N], ids of the target's vocabulary."""
        target = self.teacher.on(batch.input_ids.device)
        reading = self.reading(batch)
        embedding = target.get_input_embeddings().weight
        hidden = hidden_behind(self.model, embedding, batch, reading)
        if self.model.previous_token is not None:
            before = batch.at_labels(batch.input_ids.gather(1, batch.places))
            embedded = F.embedding(before, embedding)
            hidden = self.model.previous_token(hidden, embedded, batch.slots() > 0)
        weight = target.get_output_embeddings().weight
        if self.draftable is not None:
            weight = weight[self.draftable]
        logits = F.linear(hidden, weight.to(hidden.dtype))
        return logits, batch.at_labels(batch.labels)

    def reading(self, batch: BlocksBatch) -> Reading:
        """Runs the target on a batch's texts; caches the result for repeated calls."""
        if self._read is None or self._read[0] is not batch:
            target, text = self.teacher.on(batch.input_ids.device), batch.text
            given = {"attention_mask": text.mask(target.dtype), "position_ids": text.positions}
            with torch.autocast(batch.input_ids.device.type, enabled=False):
                found = read_target(target, self.model.config, text.input_ids, **given)
            self._read = batch, found
        return self._read[1]

    @torch.no_grad()
    def target_log_probs(self, batch: BlocksBatch) -> Tensor:
        """Returns the target's log-probabilities of the draftable tokens at labels. [N, C]"""
        target = self.teacher.on(batch.input_ids.device)
        hidden = batch.text.at_labels(self.reading(batch).hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = exact_enough(target.get_output_embeddings()(hidden))
        total = logits.logsumexp(-1, keepdim=True)
        rows = logits if self.draftable is None else logits[:, self.draftable]
        return (rows - total)[batch.same_in_text()]


def hidden_behind(
    model: StateDrafter, embedding: Tensor, batch: BlocksBatch, reading: Reading
) -> Tensor:
    """Returns the drafter's last hidden states at every labelled position.

    Shapes: embedding [V, D] -> [N, D].
    """
    most, most_begun = batch.widths
    slots = Columns.where(batch.labels != IGNORED, most)

    def of_slots(values: Tensor) -> Tensor:
        return values.gather(1, slots.places)

    depths = of_slots(torch.where(batch.before < 0, 0, batch.positions - batch.anchors))
    positions = of_slots(batch.positions)
    anchors, columns = positions - depths, of_slots(batch.places) - depths
    line = torch.arange(len(columns), device=columns.device)[:, None]
    texts = batch.labels[:, : batch.columns] != IGNORED
    begun = Columns.where(texts, most_begun)  # the anchors: a block starts after each
    said = model.anchor_inputs(reading.states[line, (begun.places - 1).clamp(min=0)].flatten(0, 1))
    said = said.unflatten(0, begun.places.shape)
    # numbers: [B, columns] index among the anchors of each column that is one
    number = torch.arange(begun.places.shape[1], device=columns.device).expand_as(begun.places)
    numbers = torch.zeros_like(batch.input_ids[:, : batch.columns])
    numbers = numbers.scatter(1, begun.places, number.where(begun.there, 0))
    columns = columns.clamp(0, batch.columns - 1)
    tokens = F.embedding(batch.input_ids[line, columns], embedding)
    given = (said[line, numbers[line, columns]], tokens, depths)
    fed = model.slot_inputs(*(part.flatten(0, 1) for part in given)).unflatten(0, columns.shape)
    # a slot attends to its row's text before the anchor, and causally to its own block
    documents = of_slots(batch.documents)
    text = batch.positions[:, None, : batch.columns] < anchors[..., None]
    text &= batch.documents[:, None, : batch.columns] == documents[..., None]
    own = (anchors[:, None] == anchors[..., None]) & (positions[:, None] <= positions[..., None])
    own &= (documents[:, None] == documents[..., None]) & slots.there[:, None]
    seen = torch.cat([text, own], 2)[:, None]
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
    mask = mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
    hidden = model(fed, positions, mask, reading.keys_values)
    ranks = batch.at_labels((batch.labels != IGNORED).cumsum(1) - 1)
    return hidden[batch.learned // batch.labels.shape[1], ranks]
