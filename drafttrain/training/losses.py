"""Losses as weighted sums with their weights; divided once, after summation over all ranks."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LossSums(NamedTuple):
    """The sums of one batch: scalars on the model's device, or vectors [M] if M independent models
    are trained at once, each with its own loss and normaliser."""

    loss: Tensor
    """Weighted sum of the losses, with gradient."""
    weight: Tensor
    """Sum of the weights; `loss` is divided by its sum over ranks and accumulation steps."""
    correct: Tensor
    """Number of predictions that equal their label."""
    counted: Tensor
    """Number of predictions checked for `correct`."""


def mean_rates(sums: Tensor, parts: Mapping[str, nn.Module] | None) -> dict[str, float]:
    """Returns mean loss and accuracy; with parts, the means over the parts, then those of each.
    Synchronises the device. Shapes: sums [4] or [4, parts]: loss, weight, correct, counted."""
    loss, weight, correct, counted = sums.cpu()
    rates = {"loss": loss / weight.clamp(min=1e-9), "accuracy": correct / counted.clamp(min=1.0)}
    found = {name: float(rate.mean()) for name, rate in rates.items()}
    for index, part in enumerate(parts or ()):
        found |= {f"{name}/{part}": float(rate[index]) for name, rate in rates.items()}
    return found


def smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows of weight * label-smoothed cross entropy, and the sum of weights.

    Shapes: logits [N, V], labels [N] (-100: no loss), weights [N]. N = 0 keeps the autograd graph.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return (losses * weights).sum(), weights.sum()


def token_sums(
    logits: Tensor, labels: Tensor, divergence: Tensor | None = None, smoothing: float = 0.0
) -> LossSums:
    """Returns the sums of N tokens, each with weight 1: of their cross entropy, or of a divergence.

    Shapes: logits [N, V], labels [N] (-100: no cross entropy, a wrong prediction), divergence [N].
    """
    if divergence is None:
        weights = (labels != -100).float()
        loss, weight = smoothed_cross_entropy(logits, labels, weights, smoothing)
    else:
        loss, weight = divergence.sum(), torch.ones_like(labels, dtype=torch.float).sum()
    correct = (logits.argmax(-1) == labels).sum()
    return LossSums(loss, weight, correct, torch.ones_like(labels).sum())


def constant_loss(counts: np.ndarray, smoothing: float) -> float:
    """Returns the label-smoothed cross entropy, in nats, of the best constant prediction for token
    counts [V]: the entropy of the smoothed frequencies."""
    probs = (1 - smoothing) * counts / counts.sum() + smoothing / len(counts)
    return float(-(probs[probs > 0] * np.log(probs[probs > 0])).sum())


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Returns sum(min(target_probs, draft_probs)) of each row: the probability that a token drawn
    from draft_probs is accepted (Leviathan et al., Theorem 3.5). Shapes: [N, C], [N, C] -> [N]."""
    return torch.minimum(target_probs, draft_probs).sum(-1)


# Divergences of the drafter's distribution from the target's: log-probabilities [N, C] of both for
# the same C tokens -> [N]. The C tokens may be a part of the vocabulary; the constant that the
# target's probability of the others would add is left out. Rows reduced to the k likeliest tokens
# have one more "token" for all others together (`merged_rows`). Let P and Q be its probabilities
# for target and drafter, and p', q' the distributions within it, normalised: then forward_kl is too
# low by P KL(p' || q'), and total_variation by min(P, Q) - sum min(p, q) over the other tokens.
# Neither is ever too high.


def forward_kl(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Returns KL(target || draft) = sum p log(p / q), with 0 log 0 = 0; d KL / d log q = -p."""
    probs = target_log_probs.exp()
    return torch.where(probs > 0, probs * (target_log_probs - draft_log_probs), 0.0).sum(-1)


def total_variation(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Returns 1 - sum min(target, draft), the rejection rate of a draft token (Leviathan et al.,
    Theorem 3.5). For a part of the vocabulary it is exact if the drafter drafts no other tokens."""
    return 1.0 - overlap(target_log_probs.exp(), draft_log_probs.exp())


DIVERGENCES = {"forward_kl": forward_kl, "total_variation": total_variation}
"""Divergences by the names of their weights in the settings (`FollowTargetConfig`)."""


def acceptance_loss(
    logits: Tensor, acceptance: Tensor, rejection_weight: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Returns the weighted binary cross entropy with soft labels and the weight of each position.

    P * -log(P^) + w_rej * (1 - P) * -log(1 - P^), where P^ = sigmoid(logit) and acceptances weigh 1
    (SpecDec++ Section 3.3); a position's weight is P + w_rej * (1 - P). Computed from logits, so it
    is finite for any finite logit, and 0 * log 0 = 0.
    Shapes: logits [..., N], acceptance [N] (labels P), rejection_weight [..., 1] or a number ->
    [..., N] both.
    """
    of_rejection = rejection_weight * (1 - acceptance)
    losses = -acceptance * F.logsigmoid(logits) - of_rejection * F.logsigmoid(-logits)
    return losses, (acceptance + of_rejection).expand_as(losses)
