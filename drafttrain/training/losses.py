"""Losses as sums with their weights; the division happens once, after all ranks are added up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LossSums(NamedTuple):
    """What one batch adds to a step: scalars on the model's device, or vectors [M] where M models
    that share nothing are trained at once, each with a loss and a normaliser of its own."""

    loss: Tensor
    """Weighted sum of the losses, with gradient."""
    weight: Tensor
    """Sum of the weights that `loss` is to be divided by, over ranks and accumulation."""
    correct: Tensor
    """Predictions that hit their label."""
    counted: Tensor
    """Predictions counted in `correct`."""


def mean_rates(sums: Tensor, parts: Mapping[str, nn.Module] | None) -> dict[str, float]:
    """Mean loss and accuracy of some steps; with parts, their means over the parts and then each
    part's. Waits for the device. Shapes: sums [4] or [4, parts]: loss, weight, correct, counted."""
    loss, weight, correct, counted = sums.cpu()
    rates = {"loss": loss / weight.clamp(min=1e-9), "accuracy": correct / counted.clamp(min=1.0)}
    found = {name: float(rate.mean()) for name, rate in rates.items()}
    for index, part in enumerate(parts or ()):
        found |= {f"{name}/{part}": float(rate[index]) for name, rate in rates.items()}
    return found


def smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sum over rows of weight * label-smoothed cross entropy, and the sum of weights.

    Shapes: logits [N, V], labels [N] (-100: no loss), weights [N]. N = 0 keeps a graph.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return (losses * weights).sum(), weights.sum()


def constant_loss(counts: np.ndarray, smoothing: float) -> float:
    """Label-smoothed cross entropy of the best constant prediction of tokens of these frequencies,
    in nats: the entropy of the smoothed frequencies. Shapes: counts [V]."""
    probs = (1 - smoothing) * counts / counts.sum() + smoothing / len(counts)
    return float(-(probs[probs > 0] * np.log(probs[probs > 0])).sum())


def followed_cross_entropy(
    logits: Tensor, teacher_probs: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over rows of weight * -sum(teacher_probs * log probs), and the sum of weights.

    Ids that only one of the two vocabularies has (padding up to a round size) take no part.
    Shapes: logits [N, V], teacher_probs [N, V'], weights [N]. N = 0 keeps a graph.
    """
    shared = min(logits.shape[-1], teacher_probs.shape[-1])
    log_probs = logits.float().log_softmax(-1)[:, :shared]
    losses = -(teacher_probs[:, :shared] * log_probs).sum(-1)
    return (losses * weights).sum(), weights.sum()


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """sum(min(target_probs, draft_probs)) of each row: the probability that a token drawn from the
    drafter's row is accepted (Leviathan et al., Theorem 3.5). Shapes: [N, C], [N, C] -> [N]."""
    return torch.minimum(target_probs, draft_probs).sum(-1)


# Divergences of a drafter's rows from the target's, of log-probabilities [N, C] of both for the
# same C tokens -> [N]. The C tokens may be a part of the vocabulary: what the target gives other
# tokens then adds a constant that is left out. Rows that are cut to their k likeliest tokens have
# one more "token", all others together (`merged_rows`), so that with P and Q what target and
# drafter give these, forward_kl is too low by P KL(p' || q') of the rows among the others, each
# summing to 1, and total_variation by min(P, Q) - sum min(p, q) over the others. Neither is ever
# too high.


def forward_kl(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """KL(target || draft) = sum p log(p / q); the gradient by log q is -p. 0 log 0 = 0."""
    probs = target_log_probs.exp()
    return torch.where(probs > 0, probs * (target_log_probs - draft_log_probs), 0.0).sum(-1)


def total_variation(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """1 - sum min(target, draft), how often a drafted token is rejected (Leviathan et al., Theorem
    3.5). Of a part of the vocabulary: exact where the drafter drafts nothing else."""
    return 1.0 - overlap(target_log_probs.exp(), draft_log_probs.exp())


def merged_rows(log_probs: Tensor, places: Tensor, merge: bool = True) -> Tensor:
    """Log-probabilities of these tokens of each row and, where merge is set, in one more column of
    all others together. Shapes: log_probs [N, C], places [N, k] -> [N, k] or [N, k + 1]."""
    chosen = log_probs.gather(1, places)
    if not merge:
        return chosen
    others = log_probs.scatter(1, places, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], dim=1)


DIVERGENCES = {"forward_kl": forward_kl, "total_variation": total_variation}
"""By the settings that weigh them (`FollowTargetConfig`)."""


def acceptance_loss(
    logits: Tensor, acceptance: Tensor, rejection_weight: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Weighted binary cross entropy with soft labels, and the weights, position by position.

    P * -log(P^) + w_rej * (1 - P) * -log(1 - P^), where P^ = sigmoid(logit) and acceptances weigh 1
    (SpecDec++ Section 3.3); a position's weight is P + w_rej * (1 - P). From logits, so finite for
    any finite logit, and 0 * log 0 = 0.
    Shapes: logits [..., N], acceptance [N] (labels P), rejection_weight [..., 1] or a number ->
    [..., N] both.
    """
    of_rejection = rejection_weight * (1 - acceptance)
    losses = -acceptance * F.logsigmoid(logits) - of_rejection * F.logsigmoid(-logits)
    return losses, (acceptance + of_rejection).expand_as(losses)


def binary_kl(logits: Tensor, acceptance: Tensor) -> Tensor:
    """KL(P || P^) between Bernoulli distributions at each position, in nats; 0 * log 0 = 0.

    Shapes: logits [..., N], acceptance [N] (labels P) -> [..., N].
    """
    losses, _ = acceptance_loss(logits, acceptance, 1.0)
    entropy = -torch.xlogy(acceptance, acceptance) - torch.xlogy(1 - acceptance, 1 - acceptance)
    return losses - entropy
