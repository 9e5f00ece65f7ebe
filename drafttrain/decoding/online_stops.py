"""Stop policies that learn while a sequence is decoded, from what was accepted of earlier rounds.

They need no training. What they know is of one sequence, so that none depends on its neighbours,
and changes between rounds only. Within a round they go by rows of earlier tokens as all policies
do; a round's output follows the target's law whatever the rounds before it were, so they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from drafttrain.decoding.roles import RoundFacts
from drafttrain.decoding.stopping import entropy, largest_probability
from drafttrain.decoding.types import DraftState

STEEPEST = 8.0
"""Largest logit of a probability that is told apart."""


class RowFacts(NamedTuple):
    """What these policies see of a drafter's row, before temperature."""

    entropy: float
    """Nats."""
    largest: float
    """The probability of its likeliest token."""


class OnlineLogistic:
    """Go on until some token was probably rejected, by one feature: the row's largest probability.

    P_j = sigmoid(a + b logit(max q_j)); it goes on while 1 - prod_j P_j <= h, as an acceptance head
    does. After a round every token up to the first rejected one is an observation. It starts with
    a = 0, b = 1, P_j = max q_j, and is fitted as Gaussian beliefs about a and b of that mean and of
    variance 1 are updated: precision += P (1 - P) x x^T, (a, b) += precision^-1 (y - P) x.
    """

    def __init__(self) -> None:
        self.offset, self.slope = 0.0, 1.0
        self.rows: list[RowFacts] = []
        """Those seen in this round; their entropy is not looked at."""
        self._precision = (1.0, 0.0, 1.0)

    def __call__(self, state: DraftState, h: float) -> bool:
        known = self.rows if state.depth else []
        new = [RowFacts(0.0, largest_probability(row)) for row in state.logits[len(known) :]]
        return self.goes_on([*known, *new], h)

    def goes_on(self, rows: Sequence[RowFacts], h: float) -> bool:
        """Whether to draft one more token behind all the rows known in this round."""
        self.rows = list(rows)
        return 1.0 - math.prod(self.acceptance(logit(row.largest)) for row in rows) <= h

    def acceptance(self, feature: float) -> float:
        """Predicted probability that a token of this feature is accepted."""
        return 1.0 / (1.0 + math.exp(-(self.offset + self.slope * feature)))

    def learn(self, facts: RoundFacts, h: float) -> None:
        """Of the tokens whose rows were seen, up to the first that was rejected."""
        judged = min(facts.accepted + 1, facts.drafted)
        for place, row in enumerate(self.rows[:judged]):
            self._observe(logit(row.largest), place < facts.accepted)

    def _observe(self, feature: float, accepted: bool) -> None:
        expected = self.acceptance(feature)
        spread = expected * (1.0 - expected)
        one, mixed, squared = self._precision
        one, mixed = one + spread, mixed + spread * feature
        squared += spread * feature * feature
        self._precision = (one, mixed, squared)
        surprise, determinant = accepted - expected, one * squared - mixed * mixed
        self.offset += surprise * (squared - mixed * feature) / determinant
        self.slope += surprise * (one * feature - mixed) / determinant


def always(rows: Sequence[RowFacts], value: float) -> bool:
    """Go on to the most tokens of a round."""
    return True


def certain(rows: Sequence[RowFacts], nats: float) -> bool:
    """The rule of `stopping.certain`."""
    return not rows or rows[-1].entropy <= nats


def confident(rows: Sequence[RowFacts], least: float) -> bool:
    """The rule of `stopping.confident`; of rows alone, so right at any temperature."""
    return not rows or rows[-1].largest >= least


def likely_so_far(rows: Sequence[RowFacts], least: float) -> bool:
    """The rule of `stopping.likely_so_far`."""
    return math.prod(row.largest for row in rows) >= least


class StopBandit:
    """Choose a stop rule for each round by how well each has paid so far (TapOut).

    UCB1 over `ARMS`: each is tried once, then the one of largest mean reward + sqrt(2 ln t / n).
    The reward of a round is its tokens over its cost, (accepted + 1) / (1 + c drafted), as a share
    of the best that a round can have, so that it lies in [0, 1]. c is what a drafted token costs
    in target calls.
    """

    ARMS = (
        (certain, 1.5),
        (certain, 0.5),
        (confident, 0.4),
        (confident, 0.7),
        (likely_so_far, 0.3),
        (always, 0.0),
    )
    """Rules and their thresholds."""

    def __init__(self) -> None:
        self.arm = 0
        self.rows: list[RowFacts] = []
        """Those seen in this round."""
        self.pulls, self.rewards = [0] * len(self.ARMS), [0.0] * len(self.ARMS)

    def __call__(self, state: DraftState, cost: float) -> bool:
        known = self.rows if state.depth else []
        new = [
            RowFacts(entropy(row), largest_probability(row)) for row in state.logits[len(known) :]
        ]
        return self.goes_on([*known, *new], cost)

    def goes_on(self, rows: Sequence[RowFacts], cost: float) -> bool:
        """Whether to draft one more token behind all the rows known in this round."""
        self.rows = list(rows)
        rule, value = self.ARMS[self.arm]
        return rule(rows, value)

    def learn(self, facts: RoundFacts, cost: float) -> None:
        """Pay the arm of the round, and choose that of the next."""
        paid = (facts.accepted + 1) / (1.0 + cost * facts.drafted)
        most = max(1.0, (facts.longest + 1) / (1.0 + cost * facts.longest))
        self.pulls[self.arm] += 1
        self.rewards[self.arm] += paid / most
        self.arm = max(range(len(self.ARMS)), key=self._promise)

    def _promise(self, arm: int) -> float:
        """The upper confidence bound of an arm; those not tried come first, in order."""
        pulls = self.pulls[arm]
        if pulls == 0:
            return math.inf
        return self.rewards[arm] / pulls + math.sqrt(2.0 * math.log(sum(self.pulls)) / pulls)


def logit(probability: float) -> float:
    """log(p / (1 - p)), at most `STEEPEST` either way."""
    if not 0.0 < probability < 1.0:
        return STEEPEST if probability >= 1.0 else -STEEPEST
    return max(-STEEPEST, min(STEEPEST, math.log(probability) - math.log1p(-probability)))
