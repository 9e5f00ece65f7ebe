"""A few signals at random points; `python -m tests.faults` sends a hundred and more."""

import signal

from tests.faults.kills import break_off, prepare


def test_runs_broken_off_at_random_points_end_as_the_uninterrupted_one(tmp_path):
    wholes = prepare(tmp_path, ("distil", "train", "cache"))
    for number, signals in ((signal.SIGKILL, 4), (signal.SIGTERM, 2)):
        counts, wrong = break_off(tmp_path, wholes, signals, number, seed=4)
        assert not wrong
        assert sum(counts[name, "signals"] for name in wholes) == signals
        assert all(counts[name, "runs"] == counts[name, "identical"] for name in wholes)
