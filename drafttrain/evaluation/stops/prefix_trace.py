"""Rounds of block verification along a known output: see `trace.py` for what replays are.

Block verification (Sun et al. 2024) accepts a prefix of i drafted tokens with w_i; w_0 = 1 and
w_i = min(1, w_{i-1} p / q) at token i, p being the target's and q the drafter's probability. So of
the outputs that begin with x_1 ... x_i, those whose round accepted them all have the probability
q(x_1) ... q(x_i) w_i, and given the output the i-th token is accepted behind accepted ones with
min(1, q / (w_{i-1} p)): token by token, as rejection is, but for the weight. Where that fails no
longer prefix was accepted, which has the probability 1 - w_j given j drafted tokens; so the token
drafted there follows Norm[(q - w_{i-1} p)+], and those behind it the same with their own weights.
The weights begin anew with each round: every round has coins and a wrong branch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.evaluation.stops.drafts_after_rejection import Beside, feed_all
from drafttrain.evaluation.stops.trace import Array, WrongBranch


def kept_prefixes(draft: Tensor, target: Tensor, weighed: bool = True) -> tuple[Tensor, Tensor]:
    """Acceptance of each token of a round given the output and that those before it were accepted.

    min(1, q / (w p)), and the weights w of the prefixes before each token and of the whole. Not
    weighed: all are 1, as for token-by-token rejection.
    Shapes: probabilities of the output's tokens, draft [A, K], target [A, K] -> [A, K], [A, K + 1].
    """
    smallest = torch.finfo(target.dtype).tiny
    kept, weights = [], [torch.ones_like(target[:, 0])]
    for at_draft, at_target in zip(draft.T, target.T, strict=True):
        share = (weights[-1] * at_target).clamp_min(smallest)
        kept.append((at_draft / share).clamp_max(1.0))
        after = (share / at_draft.clamp_min(smallest)).clamp_max(1.0)
        weights.append(after if weighed else weights[0])
    return torch.stack(kept, dim=1), torch.stack(weights, dim=1)


def run_prefixes(
    draft: Tensor, target: Tensor, longest: Array, tosses: int, randomness: Randomness
) -> tuple[Array, Tensor]:
    """Accepted tokens of a round from each position of an output, and the weights on the way.

    longest [L]: most tokens that a round may draft. Shapes: draft, target [L], the probabilities of
    the output's tokens -> [R, L], [L, K + 1].
    """
    length = len(draft)
    most = np.minimum(longest, length - np.arange(length))
    places = torch.arange(length)[:, None] + torch.arange(max(1, int(most.max())))
    places = places.clamp_max(length - 1).to(draft.device)
    kept, weights = kept_prefixes(draft[places], target[places])
    run = np.zeros((tosses, length), dtype=np.int64)
    for toss in range(tosses):
        for position in np.flatnonzero(most > 0):
            run[toss, position] = randomness.accept_run(kept[position, : most[position]])
    return run, weights


def weighed_law(draft_probs: Tensor, target_probs: Tensor, weights: Tensor) -> Tensor:
    """What a token follows where no longer prefix was accepted: Norm[(q - w p)+], or q where that
    is all zero. Shapes: [N, V], [N, V], [N] -> [N, V]."""
    excess = (draft_probs - weights[:, None] * target_probs.to(draft_probs)).clamp_min(0.0)
    total = excess.sum(dim=-1, keepdim=True)
    return torch.where(total > 0.0, excess / total, draft_probs)


def weights_after(
    draft_probs: Tensor, target_probs: Tensor, weights: Tensor, tokens: Tensor
) -> list[float]:
    """min(1, w p / q) at each token. Shapes: [N, V], [N, V], [N], [N] -> N numbers."""
    at_draft = draft_probs.gather(-1, tokens[:, None])[:, 0]
    at_target = target_probs.to(draft_probs).gather(-1, tokens[:, None])[:, 0]
    ratio = at_target / at_draft.clamp_min(torch.finfo(at_draft.dtype).tiny)
    return (weights * ratio).clamp_max(1.0).tolist()


def grow_weighed(
    drafter: Beside,
    target: Beside,
    branches: Sequence[WrongBranch],
    sampling: Sampling,
    randomness: Randomness,
) -> None:
    """Draft all branches together, each token given that no longer prefix was accepted.

    Target and drafter are fed the last token of each, beside the output that both have cached.
    """
    growing = list(branches)
    while growing:
        fed = [branch.tokens[-1] for branch in growing]
        score, judged = drafter.feed(fed), target.feed(fed)
        draft_probs, target_probs = warp(score.logits, sampling), warp(judged.logits, sampling)
        weights = draft_probs.new_tensor([branch.weight for branch in growing])
        tokens = randomness.categorical(weighed_law(draft_probs, target_probs, weights))
        after = weights_after(draft_probs, target_probs, weights, tokens)
        feed_all(growing, score.logits, score.hidden, tokens.tolist())
        for branch, weight in zip(growing, after, strict=True):
            branch.weight = weight
        left = [i for i, branch in enumerate(growing) if branch.goes_on]
        growing = [growing[i] for i in left]
        drafter.keep(left)
        target.keep(left)


def target_beside(target: CachedModel, source: Source, tokens: Tensor, at: Sequence[int]) -> Beside:
    """The target with an output cached, for branches at these positions of it."""
    state, before = target.encode(source), len(source.prefix)
    target.catch_up(state, torch.cat([source.prefix, tokens.to(source.prefix.device)]))
    return Beside(target, state, before + len(tokens), before, at)
