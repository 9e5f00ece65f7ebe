"""Stop policies: how far to draft in a round. None of them sees the token it decides about.

Rejection sampling stays exact if and only if whether a token is submitted depends on the prefix,
on earlier tokens of the draft and on independent randomness, never on that token's own value.
`DraftState` holds nothing else, so every policy here is exact; in greedy decoding a draft is a
point mass, and any truncation of it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.config.kinds import Evidence, StateKind
from drafttrain.config.stops import STOPS
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.types import DraftState, Sampling
from drafttrain.models.acceptance_head import AcceptanceHead, quick_judge


@dataclass(frozen=True)
class FixedLength:
    """Always k tokens."""

    k: int
    """Tokens; levels of a tree."""
    state_kind: StateKind | None = None
    """Nothing decides here, but states of this kind are shown, and logged, all the same."""
    requires = STOPS["fixed"].requires

    @property
    def name(self) -> str:
        return f"k={self.k}"

    @property
    def longest(self) -> int:
        return self.k

    def check_sampling(self, sampling: Sampling) -> None:
        """Any sampling is right: a count knows no values."""

    def should_draft(self, state: DraftState) -> bool:
        return state.depth < self.k


@dataclass(frozen=True)
class Entropy:
    """Stop after a row of more nats than `entropy`, before temperature, top-k and top-p.

    It looks at the newest row that is known: with a drafter of one token a call that of the last
    drafted token, with a block drafter that of the token to be drafted.
    """

    entropy: float
    max_draft: int
    state_kind = None
    requires = STOPS["entropy"].requires

    @property
    def name(self) -> str:
        return f"entropy({self.entropy:g})"

    @property
    def longest(self) -> int:
        return self.max_draft

    def check_sampling(self, sampling: Sampling) -> None:
        """Any sampling is right: a row is known before a token is drawn from it."""

    def should_draft(self, state: DraftState) -> bool:
        if state.depth >= self.max_draft:
            return False
        return not state.logits or entropy(state.logits[-1]) <= self.entropy


@dataclass(frozen=True)
class Confidence:
    """Stop after a token of less probability than `confidence`; greedy decoding only.

    As Transformers' assistant_confidence_threshold. In greedy decoding the token's probability is
    the largest of its row, of the newest row that is known.
    """

    confidence: float
    max_draft: int
    state_kind = None
    requires = STOPS["confidence"].requires

    @property
    def name(self) -> str:
        return f"confidence({self.confidence:g})"

    @property
    def longest(self) -> int:
        return self.max_draft

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ValueError where tokens are sampled."""
        if not sampling.greedy:
            raise ValueError(
                f"stop policy {self.name!r} goes by the probability of the drafted token itself, "
                f"but temperature is {sampling.temperature}: whether a sampled token is submitted "
                "may not depend on its own value (dropping unlikely tokens would change the "
                "output's distribution); use the entropy or head policy, or temperature 0"
            )

    def should_draft(self, state: DraftState) -> bool:
        if state.depth >= self.max_draft:
            return False
        return not state.logits or largest_probability(state.logits[-1]) >= self.confidence


@dataclass(frozen=True)
class HeadPolicy:
    """Stop when some drafted token was probably rejected: 1 - prod_j P_j > h.

    SpecDec++ (Huang et al. 2024), Algorithm 2; P_j is the acceptance head's probability at the
    j-th state. With a drafter of one token a call and states of tokens at their own positions, the
    last drafted token has no state yet and is submitted unscored; states of tokens as they were
    drawn have no such lag. With a block drafter all slots are judged in one call and the product
    runs up to the one asked about, so that a block ends before verification. Without any state it
    goes on.
    """

    head: AcceptanceHead
    h: float
    max_draft: int
    judge: Callable[[Tensor], float] = field(init=False, repr=False, compare=False)
    requires = STOPS["head"].requires

    def __post_init__(self) -> None:
        self.head.requires_grad_(False).eval()
        object.__setattr__(self, "judge", quick_judge(self.head))

    @property
    def name(self) -> str:
        return f"head({self.h:g})"

    @property
    def state_kind(self) -> StateKind:
        return self.head.config.state

    @property
    def longest(self) -> int:
        return self.max_draft

    def check_sampling(self, sampling: Sampling) -> None:
        """Any sampling is right: states are of tokens already drafted, or of masks."""

    def should_draft(self, state: DraftState) -> bool:
        if state.depth >= self.max_draft:
            return False
        return not state.hidden or self.rejection(state) <= self.h

    def rejection(self, state: DraftState) -> float:
        """Predicted probability that at least one token, up to the one asked about, is rejected."""
        judged = state.notes.setdefault("acceptance", [])
        new = state.hidden[len(judged) :]
        if len(new) == 1:
            judged.append(self.judge(new[0]))
        elif new:
            judged.extend(self.head.acceptance(torch.stack(tuple(new))).tolist())
        return 1.0 - math.prod(judged[: state.depth + 1])


@dataclass(frozen=True)
class Gain:
    """Stop when the last level of a tree added no more than delta expected accepted tokens.

    OPT-Tree (Wang et al. 2025), Algorithm 1: delta lies between t_draft / t_target, what a level
    costs, and 1; 0 goes on to the greatest depth. The tree holds no drawn tokens, so nothing it
    depends on can bias the output.
    """

    delta: float
    max_draft: int
    """Most levels."""
    state_kind = None
    requires = STOPS["gain"].requires

    @property
    def name(self) -> str:
        return f"gain({self.delta:g},{self.max_draft})"

    @property
    def longest(self) -> int:
        return self.max_draft

    def check_sampling(self, sampling: Sampling) -> None:
        """Any sampling is right: the tree is the same whatever is sampled."""

    def should_draft(self, state: DraftState) -> bool:
        if state.depth >= self.max_draft:
            return False
        if not state.expected:
            return True
        before = state.expected[-2] if len(state.expected) > 1 else 0.0
        return state.expected[-1] - before > self.delta


@dataclass(frozen=True)
class Capped:
    """Another policy, but never more than `limit` tokens (what is left to generate, less one).

    The limit counts tokens and knows none of their values, so it cannot bias the output.
    """

    policy: StopPolicy
    limit: int

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def state_kind(self) -> StateKind | None:
        return self.policy.state_kind

    @property
    def requires(self) -> frozenset[Evidence]:
        return self.policy.requires

    @property
    def longest(self) -> int:
        return min(self.policy.longest, self.limit)

    def check_sampling(self, sampling: Sampling) -> None:
        self.policy.check_sampling(sampling)

    def should_draft(self, state: DraftState) -> bool:
        return state.depth < self.limit and self.policy.should_draft(state)


def entropy(logits: Tensor) -> float:
    """Of the softmax of a row, in nats; excluded tokens count nothing. Shapes: [V]."""
    return torch.special.entr(logits.softmax(dim=-1)).sum().item()


def largest_probability(logits: Tensor) -> float:
    """Of the softmax of a row. Shapes: [V]."""
    return (logits.max() - logits.logsumexp(dim=-1)).exp().item()
