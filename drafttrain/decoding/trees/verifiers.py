"""Verification rules on draft trees: walk down from the root while a child is accepted.

Row 0 of the target's logits judges the roots, row i + 1 the children of node i. At each node a rule
tries its children; the walk goes on below an accepted one, and ends with one more token from what
the rule leaves of the target's distribution. A chain is a tree of width one, on which every
rejection rule here is speculative sampling (Leviathan et al. 2023).

Siblings drawn independently (`iid`) are a multiset: equal draws of one row are one node with a
count, and copies are tried in a fresh uniformly random order, which has the law of the draw order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Proposal, Sampling, Verdict
from drafttrain.decoding.verifiers import make_verifier, probability_ratio, residual


@dataclass(frozen=True)
class Children:
    """The children of one node, as its rule sees them."""

    nodes: Sequence[int]
    """Indices of the proposal, in draw order."""
    tokens: Sequence[int]
    copies: Sequence[int]
    """How often each was drawn."""
    draft_probs: Tensor | None
    """[C, V] the row each was drawn from; None = point masses."""


@dataclass(frozen=True)
class Choice:
    """What a rule makes of a node's children."""

    child: int | None
    """Index into `Children.nodes` of the one accepted; None = no child was."""
    next_probs: Tensor
    """[V] where no child was accepted: what the next token is drawn from."""


Rule = Callable[[Tensor, Children, Randomness], Choice]
"""Accepts at most one child of a node, whose row is the target's probabilities [V]."""


def walk_down(
    rule: Rule,
    proposal: Proposal,
    target_logits: Tensor,
    sampling: Sampling,
    randomness: Randomness,
) -> Verdict:
    """Rejection sampling on trees by a rule for siblings; lossless for the draws that it is for.

    At temperature 0 target is a point mass. Shapes: target_logits [N + 1, V].
    """
    below = children_of(proposal)
    path: list[int] = []
    while True:
        place = path[-1] + 1 if path else 0
        row, nodes = warp(target_logits[place], sampling), below[place]
        if not nodes:
            choice = Choice(None, row)
        else:
            choice = rule(row, _children(proposal, nodes, row), randomness)
        if choice.child is None:
            next_token = int(randomness.categorical(choice.next_probs[None]))
            return Verdict(torch.tensor(path, dtype=torch.long), next_token)
        path.append(nodes[choice.child])


def recurse(target_probs: Tensor, children: Children, randomness: Randomness) -> Choice:
    """Siblings drawn without replacement from one row d (RSD, Jeon et al. 2024, Algorithms 1, 6).

    Each sibling in draw order is accepted with min(1, t / d); on rejection, in this order: t
    becomes Norm[(t - d)+], the token leaves d, d is normalised.
    """
    target, draft = target_probs, _rows(children, target_probs)[0]
    for index, token in enumerate(children.tokens):
        if _accepted(target[token], draft[token], randomness):
            return Choice(index, target)
        target = residual(target, draft)
        draft = without(draft[None], token)[0]
    return Choice(None, target)


def multi_round(target_probs: Tensor, children: Children, randomness: Randomness) -> Choice:
    """Siblings drawn independently (SpecInfer, Miao et al. 2024).

    Each copy is accepted with min(1, t / d); on rejection t becomes Norm[(t - d)+] and d stays.
    Siblings may come from rows of several drafters.
    """
    target, draft = target_probs, _rows(children, target_probs)
    for index in _copies(children, randomness):
        token = children.tokens[index]
        if _accepted(target[token], draft[index, token], randomness):
            return Choice(index, target)
        target = residual(target, draft[index])
    return Choice(None, target)


def k_seq(target_probs: Tensor, children: Children, randomness: Randomness) -> Choice:
    """K siblings drawn independently from one row (SpecTr, Sun et al. 2023, Algorithm 3).

    Each copy is accepted with min(1, t / (gamma d)), gamma as `k_seq_gamma`; where none is, the
    next token is drawn from t - min(d, t / gamma) (1 - (1 - beta)^K) / beta, normalised.
    """
    draft = _rows(children, target_probs)[0]
    tries = sum(children.copies)
    gamma = k_seq_gamma(target_probs, draft, tries)
    for index in _copies(children, randomness):
        token = children.tokens[index]
        if _accepted(target_probs[token], gamma * draft[token], randomness):
            return Choice(index, target_probs)
    overlap = torch.minimum(draft, target_probs / gamma)
    beta = float(overlap.sum())
    if beta == 0.0:
        return Choice(None, target_probs)
    reached = (1.0 - (1.0 - beta) ** tries) / beta
    return Choice(None, residual(target_probs, overlap * reached))


def k_seq_gamma(target_probs: Tensor, draft_probs: Tensor, tries: int) -> float:
    """The gamma in [1, K] at which 1 - (1 - beta)^K = gamma beta, beta = sum min(d, t / gamma).

    Below it K-SEQ would accept more of some token than the target has; the smallest such gamma
    accepts most. Shapes: [V], [V].
    """
    target, draft = (row.double().cpu().numpy() for row in (target_probs, draft_probs))

    def room(gamma: float) -> float:
        beta = float(np.minimum(draft, target / gamma).sum())
        return gamma * beta - (1.0 - (1.0 - beta) ** tries)

    if tries == 1 or room(1.0) >= 0.0:
        return 1.0
    if room(tries) <= 0.0:
        return float(tries)
    from scipy.optimize import brentq  # SpecTr alone needs it

    return float(brentq(room, 1.0, tries, xtol=1e-15, rtol=4 * np.finfo(float).eps))


def sample_target(target_probs: Tensor, children: Children, randomness: Randomness) -> Choice:
    """Any tree: draw the target's own token and go on below it if it is there (OPT-Tree)."""
    token = int(randomness.categorical(target_probs[None]))
    if token in children.tokens:
        return Choice(children.tokens.index(token), target_probs)
    return Choice(None, torch.zeros_like(target_probs).scatter_(0, torch.tensor(token), 1.0))


def verify_traversal(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
) -> Verdict:
    """Accept a node only after all below it were tried: from the leaves up. Lossless.

    Traversal verification (Weng et al. 2025, Algorithm 2): block verification on trees, and just
    that on a chain. A node is reached with weight w, the probability that it or one below it is
    accepted, 1 at the root; t is its row and d the row of its children. Child x is tried first,
    with min(1, w t(x) / d(x)); when it and all below it are rejected, t becomes
    Norm[(w t - d)+], w becomes r / (r + 1 - w) with r = sum (w t - d)+, and d is that of the next
    sibling: the same where siblings are independent, without x where they never repeat. A node
    without more children is accepted with what w is then, and the next token is drawn from t.

    Of a node that was drawn several times each copy is a try, the first with all that is below it.
    Stochastic beams, where sequences drive out each other, are exact as well (by enumeration).
    A draft ends at a node whose row is not finite.
    Shapes: target_logits [N + 1, V].
    """
    target_probs = warp(target_logits, sampling)
    below, tried = children_of(proposal), set[int]()
    for row, finite in enumerate(target_probs.sum(-1).isfinite().tolist()):
        if not finite:
            below[row] = []
    repeats = proposal.draw_kind != "without_replacement"

    def descend(node: int, weight: float) -> tuple[list[int], Tensor] | None:
        """The path from a node on and the row of the next token; None: rejected, all of it."""
        row, nodes = target_probs[node + 1], [] if node in tried else below[node + 1]
        tried.add(node)
        if nodes:
            children = _children(proposal, nodes, row)
            drafts = _rows(children, row)
            for index in _copies(children, randomness) if repeats else range(len(nodes)):
                token, draft = children.tokens[index], drafts[index]
                ratio = probability_ratio(row[None], draft[None], row.new_tensor([token]).long())
                found = descend(nodes[index], min(1.0, weight * float(ratio)))
                if found is not None:
                    return [node, *found[0]], found[1]
                row, weight = rejected_child(row, draft, weight)
                drafts = drafts if repeats else without(drafts, token)
        coin = row.new_tensor([weight])
        return ([node], row) if randomness.accept_run(coin) == 1 else None

    found = descend(-1, 1.0)
    assert found is not None, "the last committed token is accepted with certainty"
    path, next_probs = found
    next_token = int(randomness.categorical(next_probs[None]))
    return Verdict(torch.tensor(path[1:], dtype=torch.long), next_token)


def rejected_child(target: Tensor, draft: Tensor, weight: float) -> tuple[Tensor, float]:
    """A node's row and weight after a child drawn from `draft` was rejected with all below it.

    Norm[(w t - d)+] and r / (r + 1 - w), r = sum (w t - d)+; 0 / 0 counts as 1. Shapes: [V], [V].
    """
    left = float((weight * target - draft).clamp_min(0.0).sum())
    total = left + (1.0 - weight)
    return residual(target, draft, weight), left / total if total > 0.0 else 1.0


def without(drafts: Tensor, token: int) -> Tensor:
    """Rows without a token, normalised. Shapes: [C, V] -> [C, V]."""
    drafts = drafts.clone()
    drafts[:, token] = 0.0
    return drafts / drafts.sum(-1, keepdim=True).clamp_min(torch.finfo(drafts.dtype).tiny)


verify_recursive = partial(walk_down, recurse)
verify_multi_round = partial(walk_down, multi_round)
verify_k_seq = partial(walk_down, k_seq)
verify_target_walk = partial(walk_down, sample_target)

RecursiveRejection = make_verifier("recursive")
MultiRound = make_verifier("multi-round")
KSeq = make_verifier("k-seq")
TargetWalk = make_verifier("target-walk")
Traversal = make_verifier("traversal")


def children_of(proposal: Proposal) -> list[list[int]]:
    """The children of the last committed token and of each node, in draw order: N + 1 lists."""
    below: list[list[int]] = [[] for _ in range(len(proposal.tokens) + 1)]
    for node, parent in enumerate(proposal.parents.tolist()):
        below[parent + 1].append(node)
    return below


def _children(proposal: Proposal, nodes: Sequence[int], like: Tensor) -> Children:
    rows = None
    if proposal.draft_probs is not None:
        index = list(nodes) if proposal.rows is None else proposal.rows[list(nodes)].tolist()
        same = len(index) > 1 and len(set(index)) == 1  # siblings of one drafter share a row
        rows = proposal.draft_probs[index[:1] if same else index].to(like).expand(len(index), -1)
    copies = [1] * len(nodes) if proposal.counts is None else proposal.counts[list(nodes)].tolist()
    return Children(nodes, proposal.tokens[list(nodes)].tolist(), copies, rows)


def _rows(children: Children, like: Tensor) -> Tensor:
    """The rows that children were drawn from, point masses where none are given. [C, V]."""
    if children.draft_probs is not None:
        return children.draft_probs
    tokens = torch.tensor(children.tokens, device=like.device)[:, None]
    return like.new_zeros(len(children.tokens), len(like)).scatter_(1, tokens, 1.0)


def _copies(children: Children, randomness: Randomness) -> Iterator[int]:
    """Indices of the children, each as often as it was drawn, in uniformly random order."""
    left = torch.tensor(children.copies, dtype=torch.float64)
    while (total := left.sum()) > 0:
        index = 0 if len(left) == 1 else int(randomness.categorical((left / total)[None]))
        left[index] -= 1
        yield index


def _accepted(target: Tensor, draft: Tensor, randomness: Randomness) -> bool:
    """Whether an event of probability min(1, target / draft) comes true. Shapes: [], []."""
    likely = (target / draft.clamp_min(torch.finfo(draft.dtype).tiny)).clamp_max(1.0)
    return randomness.accept_run(likely[None]) == 1
