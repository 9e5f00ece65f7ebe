"""Next-token training with references or a teacher's distribution as labels."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.data.batches.examples import LabelledBatch
from drafttrain.data.encoded import source_mask
from drafttrain.decoding.engine.sources import start_token
from drafttrain.training.losses import LossSums, forward_kl, overlap, token_sums
from drafttrain.training.objective import Teacher
from drafttrain.training.objectives.follow_target import text_inputs


class LanguageModelling(nn.Module):
    """With a teacher, the loss of each position is KL(teacher || model) given the same text
    (DistillSpec, Zhou et al. 2024). This suits a drafter: a draft token is accepted with
    probability sum(min(target_probs, draft_probs)), independent of the reference.
    """

    parts = None

    def __init__(
        self,
        model: PreTrainedModel,
        label_smoothing: float = 0.0,
        teacher: PreTrainedModel | None = None,
    ):
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # FSDP gathers these one at a time
        self.label_smoothing = label_smoothing
        self.teacher = None if teacher is None else Teacher(teacher)

    def forward(self, batch: LabelledBatch, progress: float) -> LossSums:
        """Returns the sums of a batch; in eval mode the labels are always the references."""
        logits, labels = self._read(self.model, batch)
        divergence = None
        if self.teacher is not None and self.training:
            divergence = forward_kl(*self.log_probs(batch, logits))
        return token_sums(logits, labels, divergence, self.label_smoothing)

    def log_probs(self, batch: LabelledBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of teacher and model at each labelled position, [N, V] both,
        without ids that only one of the vocabularies has (padding to a round size)."""
        with torch.no_grad():
            taught, _ = self._read(self.teacher.on(batch.input_ids.device), batch)
        shared = min(taught.shape[-1], logits.shape[-1])
        teacher, model = (rows.float().log_softmax(-1)[:, :shared] for rows in (taught, logits))
        return teacher, model

    @torch.no_grad()
    def acceptance(self, batch: LabelledBatch) -> Tensor:
        """Returns the probability that the teacher accepts a token drawn from the model at each
        label, without warping. [N]"""
        rows = self.log_probs(batch, self._read(self.model, batch)[0])
        return overlap(*(log_probs.exp() for log_probs in rows))

    def _read(self, model: PreTrainedModel, batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        """Returns the model's logits at each labelled position, and the labels: [N, V], [N]."""
        ids, indices = batch.input_ids, batch.learned
        if not model.config.is_encoder_decoder:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            inputs, indices = text_inputs(model, ids, positions), indices - 1  # predicts the next
        else:
            outputs = batch.labels.roll(1, 1).clamp(min=0)  # IGNORED, on padding, is no token
            outputs[:, 0] = start_token(model.generation_config)
            seen = source_mask(model.get_encoder(), batch.attention_mask)
            inputs = {"input_ids": ids, "attention_mask": seen, "decoder_input_ids": outputs}
        logits = model(**inputs, use_cache=False).logits
        return logits.flatten(0, 1)[indices], batch.labels.flatten()[batch.learned]
