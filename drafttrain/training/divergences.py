"""Divergences of a drafter's rows from the target's, each of which a drafter can be trained on.

Every function takes log-probabilities [N, C] of both models for the same C tokens and gives the
divergence of each row, [N], with gradient by the drafter's. The C tokens may be a part of the
vocabulary: probabilities then sum up to less than 1, and what the target gives other tokens adds a
constant that is left out, or, where the function says so, is what it is.

Rows that are cut to their k likeliest tokens have one more "token", all others together
(`merged_rows`): target and drafter have there what they give these tokens in sum, and each function
is applied as it stands. What is lost is how target and drafter differ among the others, so that

- forward_kl is too low by P KL(p' || q'), with p' and q' the rows among the others, each summing to
  1, and P what the target gives them together; its gradient moves their drafter's probabilities by
  one factor;
- total_variation is too low by min(P, Q) - sum min(p, q) over the others, at most min(P, Q), with Q
  what the drafter gives them together.

Neither is ever too high.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafttrain.training.losses import overlap

Divergence = Callable[[Tensor, Tensor], Tensor]


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


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "total_variation": total_variation,
}
"""By the settings that weigh them (`FollowTargetConfig`)."""
