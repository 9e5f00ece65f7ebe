"""Threads: the user's setting is used, values that launchers set by themselves are not."""

import pytest

from drafttrain.training import threads
from drafttrain.training.threads import choose_threads

SHARE = "all this process may use"


@pytest.mark.parametrize(
    ("wanted", "variable", "launched", "processes", "count", "source"),
    [
        (5, "2", False, 1, 5, "train.threads"),
        (None, "2", False, 1, 2, "OMP_NUM_THREADS"),
        (None, "3,2", False, 1, 3, "OMP_NUM_THREADS"),
        (None, "1", False, 1, 1, "OMP_NUM_THREADS"),
        (None, "1", True, 1, 8, SHARE),
        (None, "3", True, 1, 3, "OMP_NUM_THREADS"),
        (None, "9", True, 2, 4, "OMP_NUM_THREADS"),
        (None, "many", False, 2, 4, SHARE),
        (None, "0", False, 2, 4, SHARE),
        (None, "", False, 32, 1, SHARE),
    ],
)
def test_threads_are_those_set_or_the_share_of_the_cores(
    wanted, variable, launched, processes, count, source, monkeypatch
):
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    for name in threads.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    if launched:
        monkeypatch.setenv(threads.LAUNCHED[0], "no")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    found, reason = choose_threads(wanted)
    assert found == count and reason.startswith(source)
