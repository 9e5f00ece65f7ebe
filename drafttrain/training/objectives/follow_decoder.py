"""A shallow decoder learns from its target's outputs and, row by row, from the target's decoder.

Both decoders read what the target's encoder made of a clip, which is known: the encoder itself does
not run. The loss is that of Distil-Whisper (Gandhi et al. 2023, Section 3): cross entropy of the
target's own output, plus a weight times the divergence from the target's distributions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, WhisperForCausalLM

from drafttrain.data.batches.heard import HeardBatch
from drafttrain.models.spec_drafter.slots import IGNORED
from drafttrain.training.losses import LossSums, followed_cross_entropy, smoothed_cross_entropy
from drafttrain.training.objective import Teacher


class FollowDecoder(nn.Module):
    """-log draft(y) + target_weight * KL(target || draft), up to a constant, at every token y of
    the target's output; without a target: the first part alone."""

    parts = None

    def __init__(
        self,
        model: WhisperForCausalLM,
        target: PreTrainedModel | None = None,
        target_weight: float = 0.0,
    ):
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # FSDP gathers these one at a time
        self.target_weight = target_weight
        self.teacher = None if target is None or target_weight == 0.0 else Teacher(target)

    def forward(self, batch: HeardBatch, progress: float) -> LossSums:
        logits, labels = self.rows(batch)
        weights = torch.ones_like(labels, dtype=torch.float)
        loss, weight = smoothed_cross_entropy(logits, labels, weights, smoothing=0.0)
        if self.teacher is not None and self.training:
            followed, _ = followed_cross_entropy(logits, self.target_probs(batch), weights)
            loss = loss + self.target_weight * followed
        return LossSums(loss, weight, (logits.argmax(-1) == labels).sum(), weight.detach().clone())

    def rows(self, batch: HeardBatch) -> tuple[Tensor, Tensor]:
        """The drafter's logits [N, V] at every labelled position, and the labels [N]."""
        return decoder_rows(self.model, batch)

    @torch.no_grad()
    def target_probs(self, batch: HeardBatch) -> Tensor:
        """The target's distribution there, without the tokens that it never gives. [N, V]"""
        target = self.teacher.on(batch.input_ids.device)
        logits, _ = decoder_rows(target, batch)
        never = target.generation_config.suppress_tokens or []
        logits[:, [token for token in never if token < logits.shape[-1]]] = -torch.inf
        return logits.float().softmax(-1)


def decoder_rows(model: PreTrainedModel, batch: HeardBatch) -> tuple[Tensor, Tensor]:
    """Logits of a Whisper's decoder at every labelled position, and the labels.

    Other positions go without the output projection, which takes most of the time. Shapes: [N, V],
    [N].
    """
    counted = batch.labels != IGNORED
    hidden = model.get_decoder()(
        input_ids=batch.input_ids,
        encoder_hidden_states=batch.encoded.to(model.dtype),
        use_cache=False,
    )[0]
    return model.get_output_embeddings()(hidden[counted]), batch.labels[counted]
