"""Training of a state drafter to follow its target, reading the target's states.

Blocks as in `BlocksCollator`. The target runs on every batch; the drafter attends to the target's
keys and values and reads its hidden states. The target's logits come from the same forward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.data.batches.masked_blocks import BlocksBatch
from drafttrain.decoding.engine.forward import additive
from drafttrain.models.spec_drafter.layout import IGNORED
from drafttrain.models.state_drafter import Reading, StateDrafter, read_target
from drafttrain.training.objectives.follow_target import FollowTarget


class FollowStates(FollowTarget):
    """`FollowTarget` for a drafter that reads its target's states.

    Its batches come from `BlocksCollator` with reads_prompt=False.
    """

    model: StateDrafter

    _read: tuple[BlocksBatch, Reading] | None = None

    def rows(self, batch: BlocksBatch) -> tuple[Tensor, Tensor]:
        target = self.teacher.on(batch.input_ids.device)
        reading = self.reading(batch)
        embedding = target.get_input_embeddings().weight
        hidden = states_at_labels(self.model, embedding, batch, reading)
        if self.model.previous_token is not None:
            before = batch.at_labels(batch.input_ids.gather(1, batch.text_columns))
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
                reading = read_target(target, self.model.config, text.input_ids, **given)
            self._read = batch, reading
        return self._read[1]

    @torch.no_grad()
    def target_log_probs(self, batch: BlocksBatch) -> Tensor:
        target = self.teacher.on(batch.input_ids.device)
        hidden = batch.text.at_labels(self.reading(batch).hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = target.get_output_embeddings()(hidden)
        return self.of_draftable(logits)[batch.same_in_text()]


def selected_columns(selected: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns the indices of the true columns of each row in rising order, and which are valid:
    rows with fewer than `most` are padded. Shapes: selected [B, T] -> [B, most] both."""
    indices = selected.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return indices, selected.gather(1, indices)


def states_at_labels(
    model: StateDrafter, embedding: Tensor, batch: BlocksBatch, reading: Reading
) -> Tensor:
    """Returns the drafter's last hidden states at every labelled position.

    Shapes: embedding [V, D] -> [N, D].
    """
    most_slots, most_anchors = batch.widths
    slots, is_slot = selected_columns(batch.labels != IGNORED, most_slots)
    depths, positions = batch.depths.gather(1, slots), batch.positions.gather(1, slots)
    documents = batch.documents.gather(1, slots)
    anchors, columns = positions - depths, batch.text_columns.gather(1, slots) - depths
    rows = torch.arange(len(columns), device=columns.device)[:, None]
    texts = batch.labels[:, : batch.columns] != IGNORED
    starts, is_start = selected_columns(texts, most_anchors)  # a block follows each anchor
    states = reading.states[rows, (starts - 1).clamp(min=0)]
    of_anchors = model.anchor_inputs(states.flatten(0, 1)).unflatten(0, starts.shape)
    # numbers: [B, columns] index among the anchors of each column that is one
    number = torch.arange(starts.shape[1], device=columns.device).expand_as(starts)
    numbers = torch.zeros_like(batch.input_ids[:, : batch.columns])
    numbers = numbers.scatter(1, starts, number.where(is_start, 0))
    columns = columns.clamp(0, batch.columns - 1)
    tokens = F.embedding(batch.input_ids[rows, columns], embedding)
    parts = of_anchors[rows, numbers[rows, columns]], tokens, depths
    inputs = model.slot_inputs(*(part.flatten(0, 1) for part in parts)).unflatten(0, slots.shape)
    # a slot attends to its row's text before the anchor, and causally to its own block
    text = batch.positions[:, None, : batch.columns] < anchors[..., None]
    text &= batch.documents[:, None, : batch.columns] == documents[..., None]
    block = (anchors[:, None] == anchors[..., None]) & (positions[:, None] <= positions[..., None])
    block &= (documents[:, None] == documents[..., None]) & is_slot[:, None]
    mask = additive(torch.cat([text, block], 2)[:, None], model.dtype)
    hidden = model(inputs, positions, mask, reading.keys_values)
    ranks = batch.at_labels((batch.labels != IGNORED).cumsum(1) - 1)
    return hidden[batch.learned // batch.labels.shape[1], ranks]
