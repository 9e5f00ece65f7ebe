"""How often a rule for siblings accepts one of them at a node: exact, on tiny vocabularies.

The rules are those that decode (`decoding/tree_verifiers.py`). Every draw of K siblings is visited
with its probability, and each rule is run on it; no second formula for any of them is kept here.
Beside them stands the optimum of all rules that are lossless for K independent siblings: the
optimal transport plan with membership cost (OTM; SpecTr, Sun et al. 2023, Section 4).
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
"""Draws of K siblings, V ** K of them, up to which everything is visited."""
TOLERANCE = 1e-10
"""Of the linear programme's constraints: the least that the solver takes."""

Draws = Sequence[tuple[tuple[int, ...], float]]
"""Tokens of the siblings in draw order, and the probability of drawing them."""


@dataclass(frozen=True)
class SiblingAcceptance:
    """Probabilities that one of K siblings at a node is accepted, by rule."""

    single: float
    """One sibling, speculative sampling: 1 - the total variation of target and draft."""
    multi_round: float
    k_seq: float
    optimum: float
    """The most that any lossless rule reaches on K independent siblings (OTM)."""
    recursive: float
    """Siblings drawn without replacement: as many as there are tokens, if those are fewer."""


def sibling_acceptance(
    target_probs: Tensor, draft_probs: Tensor, siblings: int
) -> SiblingAcceptance:
    """What each rule accepts of K siblings drawn from draft_probs.

    Shapes: [V], [V]. Raises ValueError for rows that are no distributions over one vocabulary,
    fewer than one sibling, and more than `MOST_DRAWS` draws.
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
    """K siblings with replacement, copies among them. Shape: [V]."""
    probs = draft_probs.tolist()
    for tokens in product(_support(probs), repeat=siblings):
        yield tokens, math.prod(probs[token] for token in tokens)


def distinct_draws(draft_probs: Tensor, siblings: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """K siblings without replacement, or all tokens that have a probability. Shape: [V]."""
    probs = draft_probs.tolist()
    support = _support(probs)
    for tokens in permutations(support, min(siblings, len(support))):
        left, probability = dict(enumerate(probs)), 1.0
        for token in tokens:
            probability *= left[token] / math.fsum(left.values())
            del left[token]
        yield tokens, probability


def rule_acceptance(rule: Rule, target_probs: Tensor, draft_probs: Tensor, draws: Draws) -> float:
    """The probability that a rejection rule accepts one of the siblings. Shapes: [V], [V]."""
    rejected = []
    for tokens, probability in draws:
        count = len(tokens)
        rows = draft_probs.expand(count, -1)
        outcome = _AllRejected()
        rule(target_probs, Children(range(count), tokens, [1] * count, rows), outcome)
        rejected.append(probability * outcome.probability)
    return max(0.0, 1.0 - math.fsum(rejected))


def transport_optimum(target_probs: Tensor, draws: Draws) -> float:
    """The most a lossless rule can accept: the largest probability that Y is among the siblings.

    Over all joint laws of the siblings, drawn with the given probabilities, and a token Y that has
    the target's law. Any lossless rule is such a joint law, Y being the token it emits, and what
    it accepts is a sibling. A linear programme: of the probability of each *set* of siblings, as
    much as possible flows to its members, none of which takes more than its target probability.
    Shape: [V].
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
    assert solution.success, f"no flow at all is feasible, yet: {solution.message}"
    return min(1.0, -float(solution.fun))


class _AllRejected:
    """`Randomness`, as far as rejection rules ask it: each sibling is rejected, with `probability`.

    Siblings come in draw order. A rule for independent ones would visit copies in random order,
    which changes nothing once all draws are summed: each order of a draw is a draw just as likely.
    """

    def __init__(self) -> None:
        self.probability = 1.0

    def categorical(self, probs: Tensor) -> Tensor:
        """The first that is possible: the next sibling in draw order."""
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
            f"{name} is no distribution: least {float(probs.min()):g}, sum {float(probs.sum()):g}; "
            "give probabilities in float64 that sum to 1"
        )
    return probs


def _check_size(vocabulary: int, siblings: int) -> None:
    if siblings < 1:
        raise ValueError(f"siblings={siblings}; give 1 or more")
    if siblings * math.log(vocabulary) > math.log(MOST_DRAWS) + 1e-9:
        raise ValueError(
            f"{siblings} siblings over {vocabulary} tokens can be drawn in {vocabulary} ** "
            f"{siblings} ways, and at most {MOST_DRAWS} are visited; take fewer siblings, or merge "
            "unlikely tokens into one"
        )
