"""Exact acceptance of the rules for siblings at one node, on tiny vocabularies.

Enumerates all draws of K siblings with their probabilities and runs the production rules
(`decoding/trees/verifiers.py`) on each; there is no second formula of any rule here. Also computes
the optimum of all lossless rules for K independent siblings: the optimal transport plan with
membership cost (OTM; SpecTr, Sun et al. 2023, Section 4).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from drafttrain.decoding.trees.verifiers import Children, Rule, k_seq, multi_round, recurse

import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import Tensor

MOST_DRAWS = 4096
"""Most draws of K siblings (V ** K) to enumerate."""
TOLERANCE = 1e-10
"""Tolerance of the linear programme, the smallest that the solver accepts."""

Draws = Sequence[tuple[tuple[int, ...], float]]
"""(tokens of the siblings in draw order, probability of this draw)."""


@dataclass(frozen=True)
class SiblingAcceptance:
    """Probability that one of K siblings at a node is accepted, by rule."""

    single: float
    """One sibling (speculative sampling): 1 - total variation between target and draft."""
    multi_round: float
    k_seq: float
    optimum: float
    """Maximum over all lossless rules for K independent siblings (OTM)."""
    recursive: float
    """K siblings drawn without replacement, or all possible tokens if they are fewer."""


def sibling_acceptance(
    target_probs: Tensor, draft_probs: Tensor, siblings: int
) -> SiblingAcceptance:
    """Computes the acceptance of each rule for K siblings drawn from draft_probs.

    Shapes: [V], [V]. Raises ValueError for rows that are not distributions over the same
    vocabulary, for fewer than one sibling, and for more than `MOST_DRAWS` draws.
    """
    target = _distribution("target_probs", target_probs)
    draft = _distribution("draft_probs", draft_probs)
    if len(target) != len(draft):
        raise ValueError(
            f"target_probs has {len(target)} tokens but draft_probs has {len(draft)}; "
            "give both over one vocabulary"
        )
    _check_size(len(draft), siblings)
    independent = list(independent_draws(draft, siblings))
    distinct = list(distinct_draws(draft, siblings))
    return SiblingAcceptance(
        single=float(torch.minimum(target, draft).sum()),
        multi_round=rule_acceptance(multi_round, target, draft, independent),
        k_seq=rule_acceptance(k_seq, target, draft, independent),
        optimum=transport_optimum(target, independent),
        recursive=rule_acceptance(recurse, target, draft, distinct),
    )


def independent_draws(
    draft_probs: Tensor, siblings: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields draws of K siblings with replacement. Shapes: [V]."""
    probs = draft_probs.tolist()
    for tokens in product(_support(probs), repeat=siblings):
        yield tokens, math.prod(probs[token] for token in tokens)


def distinct_draws(draft_probs: Tensor, siblings: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields draws of K siblings without replacement, or of all possible tokens if they are fewer.
    Shapes: [V]."""
    probs = draft_probs.tolist()
    support = _support(probs)
    for tokens in permutations(support, min(siblings, len(support))):
        left, probability = dict(enumerate(probs)), 1.0
        for token in tokens:
            probability *= left[token] / math.fsum(left.values())
            del left[token]
        yield tokens, probability


def rule_acceptance(rule: Rule, target_probs: Tensor, draft_probs: Tensor, draws: Draws) -> float:
    """Probability that a rejection rule accepts one of the siblings. Shapes: [V], [V]."""
    rejected = []
    for tokens, probability in draws:
        count = len(tokens)
        rows = draft_probs.expand(count, -1)
        outcome = _AllRejected()
        rule(target_probs, Children(range(count), tokens, [1] * count, rows), outcome)
        rejected.append(probability * outcome.probability)
    return max(0.0, 1.0 - math.fsum(rejected))


def transport_optimum(target_probs: Tensor, draws: Draws) -> float:
    """Maximum acceptance of a lossless rule: the largest probability that Y is among the siblings.

    The maximum is over all joint distributions of the siblings, drawn with the given probabilities,
    and a token Y that follows the target's distribution. Any lossless rule defines such a joint
    distribution with Y as its output, and an accepted output is a sibling. Solved as a linear
    programme: as much probability as possible flows from each *set* of siblings to its members,
    each of which takes at most its target probability. Shapes: [V].
    """
    mass: dict[frozenset[int], float] = defaultdict(float)
    for tokens, probability in draws:
        mass[frozenset(tokens)] += probability
    flows = [(row, token) for row, members in enumerate(mass) for token in sorted(members)]
    rows = [row for row, _ in flows] + [len(mass) + token for _, token in flows]
    columns = [*range(len(flows)), *range(len(flows))]
    spent = coo_array(
        ([1.0] * len(rows), (rows, columns)), shape=(len(mass) + len(target_probs), len(flows))
    )
    solution = linprog(
        c=[-1.0] * len(flows),
        A_ub=spent,
        b_ub=[*mass.values(), *target_probs.tolist()],
        method="highs",
        options={
            "primal_feasibility_tolerance": TOLERANCE,
            "dual_feasibility_tolerance": TOLERANCE,
        },
    )
    assert solution.success, f"zero flow is feasible, yet: {solution.message}"
    return min(1.0, -float(solution.fun))


class _AllRejected:
    """`Randomness` in which a rule rejects all siblings; tracks the `probability` of that.

    Siblings come in draw order. Rules for independent siblings try copies in random order; this
    does not matter for the sum over all draws, as each order of a draw is an equally likely draw.
    """

    def __init__(self) -> None:
        self.probability = 1.0

    def categorical(self, probs: Tensor) -> Tensor:
        """Returns the first possible index, which is the next sibling in draw order."""
        return (probs > 0.0).int().argmax(dim=-1)

    def accept_run(self, probs: Tensor) -> int:
        self.probability *= 1.0 - float(probs[0])
        return 0


def _support(probs: Sequence[float]) -> list[int]:
    return [token for token, probability in enumerate(probs) if probability > 0.0]


def _distribution(name: str, probs: Tensor) -> Tensor:
    probs = probs.to(device="cpu", dtype=torch.float64)
    if probs.ndim != 1 or len(probs) == 0:
        raise ValueError(f"{name} has shape {tuple(probs.shape)}; give one row of tokens, [V]")
    if not bool((probs >= 0.0).all()) or abs(float(probs.sum()) - 1.0) > 1e-9:
        raise ValueError(
            f"{name} is not a distribution: minimum {float(probs.min()):g}, sum "
            f"{float(probs.sum()):g}; give probabilities in float64 that sum to 1"
        )
    return probs


def _check_size(vocabulary: int, siblings: int) -> None:
    if siblings < 1:
        raise ValueError(f"siblings={siblings}; give 1 or more")
    if siblings * math.log(vocabulary) > math.log(MOST_DRAWS) + 1e-9:
        raise ValueError(
            f"{siblings} siblings over {vocabulary} tokens can be drawn in {vocabulary} ** "
            f"{siblings} ways, but at most {MOST_DRAWS} can be enumerated; take fewer siblings, or "
            "merge unlikely tokens into one"
        )
