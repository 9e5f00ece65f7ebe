"""The interface of training objectives, and the frozen teacher model that they may use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel

from drafttrain.data.batches.examples import Batch
from drafttrain.training.losses import LossSums


@runtime_checkable
class Objective(Protocol):
    """A training objective: an `nn.Module` with a trained model, a batch loss and these members.

    The loop calls it on every batch, adds the sums up over accumulation steps and processes, and
    divides the loss by the weight once. Its loss in eval mode (validation) uses no glancing and no
    teacher, except for teacher states that are the drafter's input.
    """

    model: nn.Module
    """The trained model; a run's `final/` has its weights, by its parameter names."""
    teacher: Teacher | None
    """A frozen model that also reads the batches. The loop does not touch it."""
    parts: Mapping[str, nn.Module] | None
    """If several independent models are trained at once: each by name, in the order of the sums'
    vectors. Each is normalised, clipped and logged as if it were trained separately."""

    def __call__(self, batch: Batch, progress: float) -> LossSums:
        """Returns the sums of a batch; `progress` runs from 0 at the first step to 1 at the last.

        Shapes: every sum is a scalar, or [P] with P parts.
        """


def mixed_seed(seed: int, key: int | str) -> int:
    """Returns the seed of random numbers that depend only on a run's seed and this key."""
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Teacher:
    """A frozen model used by an objective; not a submodule, so neither trained nor saved.

    `on` moves it to the device of the batches.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model.requires_grad_(False).eval()

    def on(self, device: torch.device) -> PreTrainedModel:
        return self.model.to(device)
