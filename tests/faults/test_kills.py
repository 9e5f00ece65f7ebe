"""A few signals at random points; `python -m tests.faults` sends a hundred and more."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.faults import ENVIRONMENT

ROOT = Path(__file__).parents[2]
SIGNALS = ["--kills", "4", "--terms", "2", "--seed", "4"]


def test_runs_broken_off_at_random_points_end_as_the_uninterrupted_one():
    command = [sys.executable, "-m", "tests.faults", *SIGNALS, "--stages", "distil,train,cache"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(SIG\w+) +\w+ +(\d+) +(\d+) +(\d+) +0 *$", done.stdout, re.M)
    assert all(runs == identical for _, _, runs, identical in rows)
    for name, sent in (("SIGKILL", 4), ("SIGTERM", 2)):
        assert sum(int(signals) for found, signals, *_ in rows if found == name) == sent
