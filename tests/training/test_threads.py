"""Threads: the user's word counts, what launchers set on their own does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from drafttrain.training import threads
from drafttrain.training.threads import choose_threads, threads_of_user

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("own", "launcher", "told"),
    [
        ({}, {}, None),
        ({"OMP_NUM_THREADS": "1"}, {}, 1),
        ({"OMP_NUM_THREADS": "3"}, {}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, {}, 3),
        ({"OMP_NUM_THREADS": "many"}, {}, None),
        ({"OMP_NUM_THREADS": "1"} | LAUNCHED, {}, None),
        ({"OMP_NUM_THREADS": "1"} | ELASTIC, {}, None),
        ({"OMP_NUM_THREADS": "1"} | LAUNCHED, {"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3"} | LAUNCHED, {"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3"} | LAUNCHED, {}, 3),  # --num_cpu_threads_per_process 3
    ],
)
def test_what_a_launcher_sets_on_its_own_does_not_count(own, launcher, told) -> None:
    assert threads_of_user(own, lambda: launcher) == told


@pytest.mark.parametrize(
    ("asked", "variable", "processes", "count", "source"),
    [
        (5, "2", 1, 5, "train.threads"),
        (None, "2", 1, 2, "OMP_NUM_THREADS"),
        (None, "9", 2, 4, "OMP_NUM_THREADS"),
        (None, None, 2, 4, "all this process may use"),
        (None, None, 32, 1, "all this process may use"),
    ],
)
def test_a_process_takes_its_share_of_the_cores_at_most(
    asked, variable, processes, count, source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    for name in threads.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("OMP_NUM_THREADS", variable or "")
    found, reason = choose_threads(asked)
    assert found == count and reason.startswith(source)


@pytest.mark.parametrize(("given", "told"), [(None, "None"), ("1", "1")])
def test_the_launcher_is_asked_what_it_was_started_with(given: str | None, told: str) -> None:
    """A parent that sets the variable for its child, as `accelerate launch` does."""
    child = (
        "import os; from drafttrain.training import threads; "
        "print(threads.threads_of_user(os.environ, threads._launcher_environment))"
    )
    parent = (
        "import os, subprocess, sys; os.environ['OMP_NUM_THREADS'] = '1'; "
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | LAUNCHED
    if given is not None:
        environment["OMP_NUM_THREADS"] = given
    done = subprocess.run(
        [sys.executable, "-c", parent], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [told]
