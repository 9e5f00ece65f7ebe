"""A few signals at random points; `python -m tests.faults` sends a hundred and more."""

import signal

from tests.faults.kills import break_off, prepare


def test_runs_broken_off_at_random_points_end_as_the_uninterrupted_one(tmp_path):
    wholes = prepare(tmp_path, ("distil", "train", "cache"))
    for name, whole in wholes.items():
        for number, signals in ((signal.SIGKILL, 2), (signal.SIGTERM, 1)):
            counts, wrong = break_off(tmp_path, {name: whole}, signals, number, seed=4)
            assert not wrong and counts[name, "signals"] == signals
            assert 0 < counts[name, "runs"] == counts[name, "identical"]
