"""Interrupts small runs at random points and checks what they leave and how they resume.

    python -m tests.faults.test_kills --kills 100 --terms 30 --seed 0

Runs of distillation, caching, training and evaluation get kill -9 (or SIGTERM) one to three times:
after a random time, right before a random file operation, or in the middle of a file. Then they are
run to the end. The result must equal that of an uninterrupted run byte for byte (for an evaluation,
except times), so no row is lost or repeated. Exit code 1 if any check fails.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults.kills import break_off, prepare
from tests.faults.stages import STAGES


def test_runs_broken_off_at_random_points_end_as_the_uninterrupted_one(tmp_path):
    wholes = prepare(tmp_path, ("distil", "train", "cache"))
    for name, whole in wholes.items():
        for number, signals in ((signal.SIGKILL, 2), (signal.SIGTERM, 1)):
            counts, wrong = break_off(tmp_path, {name: whole}, signals, number, seed=4)
            assert not wrong and counts[name, "signals"] == signals
            assert 0 < counts[name, "runs"] == counts[name, "identical"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="kill -9: how many")
    parser.add_argument("--terms", type=int, default=30, help="SIGTERM: how many")
    parser.add_argument("--seed", type=int, default=0, help="of stages and points")
    given, failed = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as made:
        wholes = prepare(Path(made), list(STAGES))
        for number, count in ((signal.SIGKILL, given.kills), (signal.SIGTERM, given.terms)):
            counts, wrong = break_off(Path(made), wholes, count, number, given.seed)
            for (name, what), found in sorted(counts.items()):
                print(f"{number.name}  {name:8}  {what:9}  {found}")
            failed += wrong
    print("\n".join(failed), file=sys.stderr)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
