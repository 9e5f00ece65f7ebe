"""What is timed."""

from types import SimpleNamespace

import pytest

from drafttrain.decoding.types import Output, Round
from drafttrain.evaluation.stops.decoded import Drafting
from drafttrain.evaluation.stops.measuring import longer_drafting, timed_lengths
from drafttrain.evaluation.stops.replay import Candidate


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


def test_a_head_costs_what_drafting_takes_longer_a_question():
    bench = SimpleNamespace(block=False, drafting=Drafting(block=False, lag=0, ends=frozenset()))

    def output(*rounds: tuple[int, float]) -> Output:
        played = [Round(0, [5] * count, [], [5], draft_seconds=took) for count, took in rounds]
        return Output([5] * len(rounds), played)

    other = output((4, 9.0), (4, 6.0), (4, 6.5), (2, 4.0), (1, 3.0))
    # three questions in a round of four tokens, one in one of two; half a second each, but for the
    # first round, which reads the prompt, and for one that was disturbed
    asked = output((4, 99.0), (4, 7.5), (4, 60.0), (2, 4.5), (1, 3.0))
    head = Candidate("head", 0.9, "D", max_draft=4)
    assert longer_drafting(bench, head, [asked], [other]) == pytest.approx(0.5)
    assert longer_drafting(bench, head, [other], [other]) == 0.0
