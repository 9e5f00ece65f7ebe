"""Verification rules for draft trees: walk down from the root while a child is accepted.

Row 0 of the target's logits verifies the roots, row i + 1 the children of node i. At each node a
rule tries the children. The walk continues at the accepted child; if there is none, it ends with
one more token, drawn from the distribution that the rule returns. A chain is a tree of width one,
on which each rejection rule here is speculative sampling (Leviathan et al. 2023).

Siblings drawn independently (`iid`) are a multiset: equal draws from one row are one node with a
count. Copies are tried in uniformly random order, which has the same distribution as the draw
order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Proposal, Sampling, Verdict
from drafttrain.decoding.verifiers import make_verifier, point_masses, residual


@dataclass(frozen=True)
class Children:
    """The C children of one node, in draw order."""

    tokens: Sequence[int]
    copies: Sequence[int]
    """How often each child was drawn."""
    draft_probs: Tensor | None
    """[C, V] the distribution each child was drawn from; None = point masses."""


NodeChoice = tuple[int | None, Tensor]
"""Index of the accepted child, None if all are rejected, and the distribution [V] of the next token
if no child is accepted."""
Rule = Callable[[Tensor, Children, Randomness], NodeChoice]
"""(target_probs [V] at a node, its children, randomness) -> at most one accepted child."""


def walk_down(
    rule: Rule,
    proposal: Proposal,
    target_logits: Tensor,
    sampling: Sampling,
    randomness: Randomness,
) -> Verdict:
    """Applies a rule for siblings from the root down; lossless for the draws the rule is made for.

    At temperature 0 the target's distribution is a point mass. Shapes: target_logits [N + 1, V].
    """
    below: list[list[int]] = [[] for _ in range(len(proposal.tokens) + 1)]
    for node, parent in enumerate(proposal.parents.tolist()):
        below[parent + 1].append(node)  # the roots, then the children of each node
    path: list[int] = []
    while True:
        index = path[-1] + 1 if path else 0
        nodes, child, next_probs = below[index], None, warp(target_logits[index], sampling)
        if nodes:
            children = _children(proposal, nodes, next_probs)
            child, next_probs = rule(next_probs, children, randomness)
        if child is None:
            next_token = int(randomness.categorical(next_probs[None]))
            return Verdict(torch.tensor(path, dtype=torch.long), next_token)
        path.append(nodes[child])


def recurse(target_probs: Tensor, children: Children, randomness: Randomness) -> NodeChoice:
    """Siblings drawn without replacement from one row d (RSD, Jeon et al. 2024, Algorithms 1, 6).

    Let t be the target's distribution. Each sibling, in draw order, is accepted with probability
    min(1, t / d). On rejection t becomes Norm[(t - d)+]; then the token is removed from d and d is
    normalised.
    """
    target, draft = target_probs, _rows(children, target_probs)[0]
    for index, token in enumerate(children.tokens):
        if _accepted(target[token], draft[token], randomness):
            return index, target
        target = residual(target, draft)
        draft = draft.clone()
        draft[token] = 0.0
        draft = draft / draft.sum().clamp_min(torch.finfo(draft.dtype).tiny)
    return None, target


def multi_round(target_probs: Tensor, children: Children, randomness: Randomness) -> NodeChoice:
    """Siblings drawn independently (SpecInfer, Miao et al. 2024).

    Let t be the target's distribution and d that of the drafter. Each copy is accepted with
    probability min(1, t / d). On rejection t becomes Norm[(t - d)+]; d does not change. Siblings
    may come from several drafters, each with its own d.
    """
    target, draft = target_probs, _rows(children, target_probs)
    for index in _copies(children, randomness):
        token = children.tokens[index]
        if _accepted(target[token], draft[index, token], randomness):
            return index, target
        target = residual(target, draft[index])
    return None, target


def k_seq(target_probs: Tensor, children: Children, randomness: Randomness) -> NodeChoice:
    """K siblings drawn independently from one row (SpecTr, Sun et al. 2023, Algorithm 3).

    Let t be the target's distribution and d that of the drafter. Each copy is accepted with
    probability min(1, t / (gamma d)), gamma from `k_seq_gamma`. If none is accepted, the next token
    is drawn from t - min(d, t / gamma) (1 - (1 - beta)^K) / beta, normalised, where
    beta = sum min(d, t / gamma).
    """
    draft = _rows(children, target_probs)[0]
    tries = sum(children.copies)
    gamma = k_seq_gamma(target_probs, draft, tries)
    for index in _copies(children, randomness):
        token = children.tokens[index]
        if _accepted(target_probs[token], gamma * draft[token], randomness):
            return index, target_probs
    overlap = torch.minimum(draft, target_probs / gamma)
    beta = float(overlap.sum())
    if beta == 0.0:
        return None, target_probs
    reached = (1.0 - (1.0 - beta) ** tries) / beta
    return None, residual(target_probs, overlap * reached)


def k_seq_gamma(target_probs: Tensor, draft_probs: Tensor, tries: int) -> float:
    """Smallest gamma in [1, K] at which K-SEQ is lossless; K is `tries`.

    Solves 1 - (1 - beta)^K = gamma beta with beta = sum min(d, t / gamma). With a smaller gamma,
    K-SEQ would emit some token more often than the target; with a larger one it accepts less.
    Shapes: [V], [V].
    """
    target, draft = (row.double().cpu().numpy() for row in (target_probs, draft_probs))

    def margin(gamma: float) -> float:
        beta = float(np.minimum(draft, target / gamma).sum())
        return gamma * beta - (1.0 - (1.0 - beta) ** tries)

    if tries == 1 or margin(1.0) >= 0.0:
        return 1.0
    if margin(tries) <= 0.0:
        return float(tries)
    from scipy.optimize import brentq  # imported here: only SpecTr needs SciPy

    return float(brentq(margin, 1.0, tries, xtol=1e-15, rtol=4 * np.finfo(float).eps))


def sample_target(target_probs: Tensor, children: Children, randomness: Randomness) -> NodeChoice:
    """Any tree: samples the target's token and accepts the child that holds it (OPT-Tree)."""
    token = randomness.categorical(target_probs[None])
    if int(token) in children.tokens:
        return children.tokens.index(int(token)), target_probs
    return None, point_masses(token, target_probs)[0]


verify_recursive = partial(walk_down, recurse)
verify_multi_round = partial(walk_down, multi_round)
verify_k_seq = partial(walk_down, k_seq)
verify_target_walk = partial(walk_down, sample_target)

RecursiveRejection = make_verifier("recursive")
MultiRound = make_verifier("multi-round")
KSeq = make_verifier("k-seq")
TargetWalk = make_verifier("target-walk")


def _children(proposal: Proposal, nodes: list[int], like: Tensor) -> Children:
    rows = None
    if proposal.draft_probs is not None:
        index = nodes if proposal.rows is None else proposal.rows[nodes].tolist()
        same = len(index) > 1 and len(set(index)) == 1  # siblings of one drafter share a row
        rows = proposal.draft_probs[index[:1] if same else index].to(like).expand(len(index), -1)
    copies = [1] * len(nodes) if proposal.counts is None else proposal.counts[nodes].tolist()
    return Children(proposal.tokens[nodes].tolist(), copies, rows)


def _rows(children: Children, like: Tensor) -> Tensor:
    """Returns the distributions [C, V] that the children were drawn from."""
    if children.draft_probs is not None:
        return children.draft_probs
    return point_masses(torch.tensor(children.tokens), like)


def _copies(children: Children, randomness: Randomness) -> Iterator[int]:
    """Yields indices of the children in random order, each as often as it was drawn."""
    remaining = torch.tensor(children.copies, dtype=torch.float64)
    while (total := remaining.sum()) > 0:
        index = 0 if len(remaining) == 1 else int(randomness.categorical((remaining / total)[None]))
        remaining[index] -= 1
        yield index


def _accepted(target: Tensor, draft: Tensor, randomness: Randomness) -> bool:
    """Accepts a token with probability min(1, target / draft). Shapes: [], []."""
    ratio = (target / draft.clamp_min(torch.finfo(draft.dtype).tiny)).clamp_max(1.0)
    return randomness.accept_run(ratio[None]) == 1
