"""What is timed."""

from types import SimpleNamespace

import pytest

from drafttrain.decoding.types import Output, Round
from drafttrain.evaluation.stops.decoded import Drafting
from drafttrain.evaluation.stops.measuring import seconds_asked, timed_lengths
from drafttrain.evaluation.stops.replay import Candidate
from drafttrain.evaluation.stops.round_costs import Curve, RoundCosts


@pytest.mark.parametrize(
    ("lengths", "timed"),
    [
        (range(1, 15), [1, 2, 4, 7, 14]),
        ([2, 3, 4, 5, 6, 7, 8, 10], [2, 3, 4, 7, 10]),
        ([8, 2], [2, 8]),
        ([5], [5, 10]),
    ],
)
def test_timed_lengths_lie_closer_where_they_are_short(lengths, timed):
    assert timed_lengths(list(lengths)) == timed


def test_what_a_policy_is_asked_costs_what_drafting_takes_longer():
    # two seconds and one a token by the curve, half a second for each of the questions asked
    costs = RoundCosts(1, Curve(2.0, (0.0,), (1.0,)), Curve(9.0, (1.0,), (0.0,)), 0.0, 1.0, 0.0)
    bench = SimpleNamespace(block=False, drafting=Drafting(block=False, lag=0, ends=frozenset()))
    rounds = [
        Round(0, drafted, [], [5], draft_seconds=2.0 + len(drafted) + asked, target_seconds=9.0)
        for drafted, asked in [([5] * 4, 77.0), ([5] * 4, 1.5), ([5] * 2, 0.5), ([5], 0.0)]
    ]  # the first reads the prompt
    outputs = [Output([5] * 4, rounds)]
    head, fixed = Candidate("head", 0.9, "D", max_draft=4), Candidate("fixed", 4)
    assert seconds_asked(bench, head, outputs, [3], costs) == pytest.approx(0.5)
    assert seconds_asked(bench, fixed, outputs, [3], costs) == 0.0
