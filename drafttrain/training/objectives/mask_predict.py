"""Mask-predict training with glancing (SpecDec): all slots of a block in one forward pass."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.batches.slots import SlotBatch, choose_revealed, glancing_ratio, reveal
from drafttrain.decoding.engine.spec_drafter import DecodedRows, EncoderStates, RowReader
from drafttrain.models.spec_drafter.layout import IGNORED, Layout, Rows
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.training.losses import LossSums, smoothed_cross_entropy


class MaskPredict(nn.Module):
    """Joint prediction of a block's slots, with glancing (SpecDec Equation 5, Section 3.1.3)."""

    parts = teacher = None

    def __init__(self, drafter: SpecDrafter, settings: ObjectiveConfig):
        super().__init__()
        self.model, self.settings = drafter, settings
        self._no_split_modules = drafter._no_split_modules
        has_masks = drafter.shape.masks(drafter.config.k) > 0
        self.prefix_apart = has_masks and not drafter.shape.bidirectional
        """Whether the prefix does not attend to blocks, so that it is run once for both passes."""

    def forward(self, batch: SlotBatch, progress: float) -> LossSums:
        """Returns the sums of a batch. `progress` runs from 0 to 1; no glancing in eval mode."""
        layout, rows, labels = batch.layout, batch.layout.rows, batch.layout.labels
        read = RowReader(self.model)  # created per call: sharding copies the model
        encoded = read.encode(batch.source, batch.attention_mask)
        prefix, start = None, 0
        if self.prefix_apart:
            start = layout.prefix_rows
            prefix = read(rows.part(0, start), encoded, keep=True)
        ratio = glancing_ratio(self.settings.glancing_start, self.settings.glancing_end, progress)
        if self.training and ratio > 0:
            with torch.no_grad(), record_function("glancing"):
                wrong = self._count_wrong(read, layout, rows.part(start), encoded, prefix)
            revealable = layout.of_blocks(layout.fill) >= 0
            revealed = choose_revealed(wrong, revealable, batch.priority, ratio)
            tokens, labels = reveal(layout, revealed, self.model.shape.anchored)
            rows = replace(rows, tokens=tokens)
        hidden = read(rows.part(start), encoded, prefix).hidden
        if prefix is not None:
            hidden = torch.cat((prefix.hidden, hidden), dim=1)
        return self._loss(hidden, labels, layout)

    def _count_wrong(
        self,
        read: RowReader,
        layout: Layout,
        rows: Rows,
        encoded: EncoderStates,
        prefix: DecodedRows | None,
    ) -> Tensor:
        """Counts the masked slots of each block that the first pass predicts wrongly, [B, A].

        The random state is restored, so that both passes have the same dropout.
        """
        device = layout.labels.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            hidden = read(rows, encoded, prefix).hidden
        if prefix is None:
            hidden = hidden[:, layout.prefix_rows :]
        hidden = hidden.unflatten(1, (layout.blocks, layout.mask_rows))
        labels = self.model.draftable_labels(layout.of_blocks(layout.labels), IGNORED)
        learned, shape = layout.learned_in_blocks, labels.shape
        labels, previous = labels.flatten(), layout.of_blocks(layout.previous).flatten()[learned]
        logits = self.model.draftable_logits(hidden.flatten(0, 2)[learned], previous)
        missed = (logits.argmax(-1) != labels[learned]) & (labels[learned] != IGNORED)
        return torch.zeros_like(labels).scatter(0, learned, missed.long()).view(shape).sum(-1)

    def _loss(self, hidden: Tensor, labels: Tensor, layout: Layout) -> LossSums:
        labels = self.model.draftable_labels(labels, IGNORED)
        weights = self._weights(labels, layout)
        counted = self._counted(layout, weights)
        labels, weights, in_block, previous = (
            values.flatten()[counted]
            for values in (labels, weights, layout.rows.block >= 0, layout.previous)
        )
        logits = self.model.draftable_logits(hidden.flatten(0, 1)[counted], previous)
        smoothing = self.settings.label_smoothing
        loss, weight = smoothed_cross_entropy(logits, labels, weights, smoothing)
        in_block &= weights > 0
        correct = (logits.argmax(-1) == labels) & in_block
        return LossSums(loss, weight, correct.sum(), in_block.sum())

    def _counted(self, layout: Layout, weights: Tensor) -> Tensor:
        """Returns the flattened indices of the columns in the loss. On a GPU all labelled columns,
        as selecting by weight would synchronise it. Shapes: weights [B, T] -> [N]."""
        all_count = self.settings.prefix_weight > 0 and self.settings.glancing_start == 0
        if all_count or weights.device.type != "cpu":
            return layout.learned
        return layout.learned[weights.flatten()[layout.learned] > 0]

    def _weights(self, labels: Tensor, layout: Layout) -> Tensor:
        """Returns the loss weights: 1 for slots, prefix_weight in the prefix. [B, T]"""
        weights = (labels != IGNORED).float()
        layout.of_prefix(weights).mul_(self.settings.prefix_weight)
        return weights
