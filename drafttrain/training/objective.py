"""What the training loop needs of an objective, and the frozen model that one may learn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel

from drafttrain.data.batches.examples import Batch
from drafttrain.training.losses import LossSums

B = TypeVar("B", bound=Batch, contravariant=True)


@runtime_checkable
class Objective(Protocol[B]):
    """What is trained, and the loss of a batch: an `nn.Module` with these members besides.

    The loop calls it on every batch, adds the sums up over accumulation steps and processes, and
    divides the loss by the weight once. In eval mode (validation) it neither smooths nor glances
    nor asks its teacher, but for what a measure asks of it by name and for what a drafter is fed.
    """

    model: nn.Module
    """What is trained and saved: its weights, by its own names, are a run's `final/`."""
    teacher: Teacher | None
    """A model that batches are also read by, without gradient. The loop does not touch it."""
    parts: Mapping[str, nn.Module] | None
    """Where several models that share nothing are trained at once: each by name, in the order of
    the sums' vectors. Each is normalised, clipped and logged as if it were trained alone."""

    def __call__(self, batch: B, progress: float) -> LossSums:
        """Sums over a batch; `progress` runs from 0 at the first step to 1 at the last.

        Shapes: every sum is a scalar, or [P] with P parts.
        """


class Teacher:
    """A frozen model beside an objective: no part of its module, so neither trained nor saved.

    It joins the batches on their device when it is first asked for there.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model.requires_grad_(False).eval()

    def on(self, device: torch.device) -> PreTrainedModel:
        return self.model.to(device)
