"""Acceptance heads of several depths and rejection weights, trained together on the same batches.

The heads share only their input, so joint training gives each head the weights of its separate
training. The work is shared: block b of all heads deeper than b is one batched matrix product over
their stacked weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.config.recipes import HeadConfig
from drafttrain.data.hidden.states import HeadBatch
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig, head_name
from drafttrain.training.losses import LossSums, acceptance_loss


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
    heads = {}
    for depth in settings.depths:
        for weight in settings.rejection_weights:
            name = head_name(depth, weight)
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            config = AcceptanceHeadConfig(
                hidden_size=hidden_size, depth=depth, rejection_weight=weight, **identity
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(digest, "big") >> 1)
                heads[name] = AcceptanceHead(config).float()
            if mean_acceptance is not None:
                mean = min(max(mean_acceptance, 1e-4), 1 - 1e-4)
                nn.init.constant_(heads[name].out.bias, math.log(mean / (weight * (1 - mean))))
    return list(heads.values())


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
            logits = sweep_logits(self.model, batch.hidden)
            losses, weights = acceptance_loss(logits, labels, self.rejection_weights)
        correct = ((logits > 0) == (labels > 0.5)).sum(-1)
        counted = torch.full_like(correct, len(labels))
        return LossSums(losses.sum(-1), weights.sum(-1), correct, counted)


def sweep_logits(heads: Sequence[AcceptanceHead], hidden: Tensor) -> Tensor:
    """Returns every head's logits for the same hidden states. Shapes: hidden [N, D] -> [H, N]."""
    order = sorted(range(len(heads)), key=lambda index: heads[index].config.depth, reverse=True)
    running = [heads[index] for index in order]
    """Heads with blocks left, deepest first; H_b of them have block b."""
    x = hidden.to(heads[0].out.weight.dtype).t().expand(len(heads), -1, -1)  # [H_b, D, N]
    logits: list[Tensor] = []
    for number in range(running[0].config.depth + 1):
        deeper = sum(head.config.depth > number for head in running)
        if ended := running[deeper:]:
            weight = torch.stack([head.out.weight for head in ended])
            bias = torch.stack([head.out.bias for head in ended])
            logits.insert(0, torch.bmm(weight, x[deeper:])[:, 0] + bias)
        if running := running[:deeper]:
            weight = torch.stack([head.blocks[number].weight for head in running])
            bias = torch.stack([head.blocks[number].bias for head in running])[..., None]
            x = x[:deeper]
            x = x + F.silu(torch.baddbmm(bias, weight, x))
    ranks = {index: rank for rank, index in enumerate(order)}
    ordered = torch.cat(logits)
    return torch.stack([ordered[ranks[index]] for index in range(len(heads))])
