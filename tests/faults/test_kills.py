"""A handful of signals at random points; `python -m tests.faults` sends a hundred and more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.faults.environment import ENVIRONMENT

ROOT = Path(__file__).parents[2]
SIGNALS = ["--kills", "4", "--terms", "2", "--seed", "2", "--stages", "distil,train"]


def test_runs_broken_off_at_random_points_end_as_the_uninterrupted_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--json", "--folder", str(tmp_path / "f"), *SIGNALS],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    accounts = json.loads(done.stdout)
    for number, sent in (("SIGKILL", 4), ("SIGTERM", 2)):
        stages = accounts[number].values()
        assert sum(account["signals"] for account in stages) == sent
        for account in stages:
            assert account["identical"] == account["runs"]
            assert (account["lost"], account["doubled"], account["wrong"]) == (0, 0, [])
