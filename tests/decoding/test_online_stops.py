"""Policies that learn between rounds, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from drafttrain.decoding.online_stops import STEEPEST, OnlineLogistic, StopBandit, logit
from drafttrain.decoding.roles import RoundFacts
from drafttrain.decoding.stopping import Bandit, Cumulative, Logistic
from drafttrain.decoding.types import DraftState


def rows(*largest: float) -> list[torch.Tensor]:
    """Logits of two tokens, the likelier of these probabilities."""
    return [torch.tensor([p, 1.0 - p], dtype=torch.float64).log() for p in largest]


def test_cumulative_confidence_is_the_product_of_the_rows_largest_probabilities():
    policy, notes = Cumulative(0.5, 9), {}
    assert policy.should_draft(DraftState(0, notes=notes))
    assert policy.should_draft(DraftState(1, rows(0.8), notes=notes))
    assert policy.should_draft(DraftState(2, rows(0.8, 0.7), notes=notes))  # 0.56
    assert not policy.should_draft(DraftState(3, rows(0.8, 0.7, 0.8), notes=notes))  # 0.448
    assert policy.name == "cumulative(0.5)"


def test_the_logistic_begins_with_the_largest_probability_itself():
    policy = Logistic(0.4, 9).open()
    assert policy.should_draft(DraftState(0))
    assert policy.should_draft(DraftState(1, rows(0.7)))  # a rejection: 0.3
    assert not policy.should_draft(DraftState(2, rows(0.7, 0.8)))  # 0.44
    assert policy.should_draft(DraftState(0)) and policy.should_draft(DraftState(1, rows(0.7)))


def test_one_step_of_the_logistic_by_hand():
    """x = logit(0.8) = ln 4, P = 0.8, y = 0: precision [[1.16, .16 x], [.16 x, 1 + .16 x^2]]."""
    stop, x = OnlineLogistic(), math.log(4.0)
    stop(DraftState(0), 0.9)
    stop(DraftState(1, rows(0.8)), 0.9)
    stop.learn(RoundFacts(drafted=1, accepted=0, longest=4), 0.9)
    precision = torch.tensor([[1.16, 0.16 * x], [0.16 * x, 1 + 0.16 * x * x]])
    step = torch.linalg.solve(precision, torch.tensor([1.0, x])) * -0.8
    assert stop.offset == pytest.approx(float(step[0]))
    assert stop.slope == pytest.approx(1.0 + float(step[1]))


def test_the_logistic_learns_of_judged_tokens_alone():
    stop, same = OnlineLogistic(), OnlineLogistic()
    stop(DraftState(3, rows(0.8, 0.6, 0.9)), 0.99)
    stop.learn(RoundFacts(drafted=4, accepted=1, longest=4), 0.99)
    same(DraftState(2, rows(0.8, 0.6)), 0.99)
    same.learn(RoundFacts(drafted=2, accepted=1, longest=4), 0.99)
    assert (stop.offset, stop.slope) == (same.offset, same.slope)


def test_the_logistic_finds_a_drafter_that_is_too_sure_of_itself():
    """Tokens of probability 0.9 that are accepted half of the time."""
    stop = OnlineLogistic()
    for turn in range(400):
        stop(DraftState(0), 0.5)
        stop(DraftState(1, rows(0.9)), 0.5)
        stop.learn(RoundFacts(1, turn % 2, 4), 0.5)
    assert stop.acceptance(logit(0.9)) == pytest.approx(0.5, abs=0.03)


def test_logits_of_sure_rows_are_finite():
    assert (logit(0.0), logit(1.0), logit(0.5)) == (-STEEPEST, STEEPEST, 0.0)


def test_the_bandit_tries_every_arm_and_then_takes_the_best_bound():
    stop, cost, arms = StopBandit(), 0.5, []
    for accepted in (0, 2, 0, 0, 0, 0):
        arms.append(stop.arm)
        stop.learn(RoundFacts(drafted=2, accepted=accepted, longest=3), cost)
    assert arms == list(range(len(StopBandit.ARMS)))
    assert stop.arm == 1
    # (2 + 1) / (1 + 0.5 * 2) = 1.5, of at most (3 + 1) / (1 + 0.5 * 3) = 1.6
    assert stop.rewards[1] == pytest.approx(1.5 / 1.6)
    for _ in range(12):  # it pays no more: others get their turn again
        stop.learn(RoundFacts(2, 0, 3), cost)
    assert min(stop.pulls) > 1


def test_sequences_begin_anew_and_do_not_share_what_they_learn():
    policy = Bandit(0.1, 4)
    one, other = policy.open(), policy.open()
    one.learn(4, 4)
    assert (one.goes_on.arm, other.goes_on.arm, policy.goes_on.arm) == (1, 0, 0)
    assert one.capped(2).goes_on is one.goes_on
    plain = Cumulative(0.5, 4)
    plain.learn(4, 4)
    assert plain.open() is plain
