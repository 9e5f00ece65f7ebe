"""Curves through timed rounds."""

import numpy as np
import pytest

from drafttrain.evaluation.runner import Decoded
from drafttrain.evaluation.stops.round_costs import (
    Curve,
    TimedRounds,
    fit_curve,
    fit_rounds,
    round_costs,
)
from tests.evaluation.stops.timed import played


def test_a_curve_by_hand():
    curve = Curve(base=3.0, knots=(1.0, 4.0), slopes=(0.5, 2.0), per_history=0.1)
    assert curve.at(np.array([1, 2, 4, 6])).tolist() == [3.0, 3.5, 4.5, 8.5]
    by_count = np.array([7, 1, 0, 0, 2])  # seven made no call, one had a row, two had four
    assert curve.total(by_count, 30.0) == pytest.approx(3.0 + 2 * 4.5 + 3.0)


def test_a_shared_call_lasts_as_long_as_the_longest_needs():
    """Two sequences, whose rounds count 1, 1, 0 and 3: 4, 4, none and 9 seconds alone."""
    curve = Curve(base=4.0, knots=(1.0,), slopes=(2.5,))
    by_count = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    beside = {0: 0.5 * 4 + 0.25 * 9, 1: 0.75 * 4 + 0.25 * 9, 3: 9.0}
    expected = [beside[0] + beside[1], beside[1] + beside[3]]
    assert curve.total(by_count, np.zeros(2), others=1) == pytest.approx(expected)
    alone = np.array([0.0, 2.0, 0.0, 0.0])
    assert curve.total(alone, 0.0, others=3) == pytest.approx(2 * 4.0)  # all alike: as timed


def test_no_count_costs_less_than_nothing():
    assert Curve(1.0, (8.0,), (2.0,)).at(1.0) == 0.0


def test_the_fit_follows_a_bend_and_the_history_and_leaves_out_disturbed_rounds():
    generator = np.random.default_rng(0)
    drafted = generator.choice([1.0, 4.0, 12.0], 600)
    history = generator.uniform(10.0, 200.0, 600)
    drafting = 1.0 * drafted + 0.002 * drafted * history
    judging = 10.0 + 0.5 * np.maximum(drafted - 4.0, 0.0) + 0.01 * history
    noise = 1.0 + 0.01 * generator.standard_normal(600)
    disturbed = np.where(generator.random(600) < 0.03, 5.0, 1.0)
    timed = TimedRounds(
        drafted, drafted + 1.0, history, drafting * noise * disturbed, judging * noise * disturbed
    )
    draft, target = fit_rounds(timed, reads_each=True)
    assert draft.at(np.array([1.0, 4.0, 12.0])) == pytest.approx([1.0, 4.0, 12.0], rel=0.04)
    assert draft.per_history == pytest.approx(0.002, rel=0.1)
    assert target.at(np.array([2.0, 5.0, 13.0])) == pytest.approx([10.0, 10.0, 14.0], rel=0.02)
    assert target.per_history == pytest.approx(0.01, rel=0.15)


def test_a_curve_never_falls():
    seconds = np.array([5.0, 4.0, 3.0] * 10)  # more rows took less: noise
    curve = fit_curve(np.array([1.0, 2.0, 3.0] * 10), np.zeros(30), seconds)
    assert curve.at(1.0) == curve.at(3.0) == pytest.approx(4.0)


def test_rounds_without_drafts_tell_nothing_of_drafting():
    nothing = np.zeros(9)
    timed = TimedRounds(nothing, nothing + 1.0, nothing, nothing, nothing + 1.0)
    with pytest.raises(ValueError, match="no timed round drafted anything; give longer outputs"):
        fit_rounds(timed, reads_each=True)


def test_rounds_are_predicted_from_their_counts_at_a_batch_size():
    runs = []
    for k in (0, 2, 5, 9):
        outputs = [played(k, rounds) for rounds in (8, 11)]
        seconds = np.array([[output.seconds for output in outputs]])
        runs.append(Decoded(f"k={k}", "chain", None, outputs, seconds))
    costs = round_costs(runs, [4, 4], 2, reads_each=True)
    assert costs.draft.at(7) == pytest.approx(14.0)
    assert costs.draft.per_history == pytest.approx(0.001)
    assert costs.target.at(np.array([1, 8])) == pytest.approx([3.0, 10.0])
    assert costs.target.per_history == pytest.approx(0.01)
    assert costs.constant == pytest.approx(9.0)
    assert costs.error == pytest.approx(0.0, abs=1e-9)
    plain = runs[0].outputs
    assert costs.plain_tokens_per_second == pytest.approx(38 / sum(o.seconds for o in plain))


def test_a_disturbed_round_makes_plain_decoding_no_slower():
    """As it makes no candidate slower: speed-ups are of the same prices."""
    speeds = []
    for disturbance in (0.0, 500.0):
        runs = []
        for k in (0, 2, 5):
            outputs = [played(k, rounds) for rounds in (8, 11, 9)]
            if k == 0:
                round = outputs[1].rounds[6]
                object.__setattr__(round, "target_seconds", round.target_seconds + disturbance)
            extra = np.array([0.0, disturbance if k == 0 else 0.0, 0.0])
            seconds = np.array([[output.seconds for output in outputs]]) + extra
            runs.append(Decoded(f"k={k}", "chain", None, outputs, seconds))
        speeds.append(round_costs(runs, [4] * 3, 2, reads_each=True).plain_tokens_per_second)
    assert speeds[1] == pytest.approx(speeds[0])


def test_rounds_of_batches_that_were_not_full_are_left_out():
    outputs = [played(2, 8), played(5, 8), played(2, 8, shared_by=1)]
    for round in outputs[2].rounds:
        object.__setattr__(round, "target_seconds", 100.0)
    runs = [
        Decoded("k", "chain", None, [output], np.array([[output.seconds]])) for output in outputs
    ]
    assert round_costs(runs, [4], 2, reads_each=True).target.at(3) == pytest.approx(5.0)
