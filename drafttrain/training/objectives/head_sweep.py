"""Acceptance heads of several depths and rejection weights, trained together on the same batches.

The heads share only their input, so joint training gives each head the weights of its separate
training.
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import nn

from drafttrain.config.recipes import HeadConfig
from drafttrain.data.hidden.states import HeadBatch
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from drafttrain.training.losses import LossSums, acceptance_loss
from drafttrain.training.objective import mixed_seed


def make_heads(
    settings: HeadConfig,
    hidden_size: int,
    seed: int,
    mean_acceptance: float | None = None,
    **identity,
) -> list[AcceptanceHead]:
    """Creates a head for every depth and every rejection weight, in float32.

    The initial weights depend only on (seed, head name), so they are the same in any sweep. If the
    mean label is given, the output bias starts at the best constant prediction. `identity`: further
    fields of the heads' configurations.
    """
    heads = []
    for depth, weight in product(settings.depths, settings.rejection_weights):
        config = AcceptanceHeadConfig(
            hidden_size=hidden_size, depth=depth, rejection_weight=weight, **identity
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed(seed, config.name))
            heads.append(AcceptanceHead(config).float())
        if mean_acceptance is not None:
            mean = min(max(mean_acceptance, 1e-4), 1 - 1e-4)
            nn.init.constant_(heads[-1].out.bias, math.log(mean / (weight * (1 - mean))))
    return heads


class HeadSweep(nn.Module):
    """Objective: each head's weighted cross entropy of acceptance (SpecDec++ Section 3.3)."""

    teacher = None

    def __init__(self, heads: Sequence[AcceptanceHead]):
        super().__init__()
        self.model = nn.ModuleList(heads)
        weights = torch.tensor([head.config.rejection_weight for head in heads])
        self.register_buffer("rejection_weights", weights[:, None], persistent=False)

    @property
    def parts(self) -> dict[str, AcceptanceHead]:
        """Returns the heads by name, in the order of the sums' vectors."""
        return {head.config.name: head for head in self.model}

    def forward(self, batch: HeadBatch, progress: float) -> LossSums:
        """Returns the sums of every head, [H] each. A prediction is correct if it is on the same
        side of 0.5 as the label."""
        labels = batch.acceptance.to(self.rejection_weights.dtype)
        with torch.autocast(batch.hidden.device.type, enabled=False):  # heads are float32
            logits = torch.stack([head(batch.hidden) for head in self.model])
            losses, weights = acceptance_loss(logits, labels, self.rejection_weights)
        correct = ((logits > 0) == (labels > 0.5)).sum(-1)
        counted = torch.full_like(correct, len(labels))
        return LossSums(losses.sum(-1), weights.sum(-1), correct, counted)
