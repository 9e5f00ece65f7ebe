"""Interrupts small runs at random points and checks what they leave and how they resume.

    python -m tests.faults --kills 100 --terms 30 --seed 0

Runs of distillation, caching, training and evaluation get kill -9 (or SIGTERM) one to three times:
after a random time, right before a random file operation, or in the middle of a file. Then they are
run to the end. The result must equal that of an uninterrupted run byte for byte (for an evaluation,
except times), so no row is lost or repeated. Exit code 1 if any check fails.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from tests.faults.kills import break_off, prepare  # noqa: E402
from tests.faults.stages import STAGES  # noqa: E402

COLUMNS = ("signals", "runs", "identical")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=100, help="kill -9: how many")
    parser.add_argument("--terms", type=int, default=30, help="SIGTERM: how many")
    parser.add_argument("--seed", type=int, default=0, help="of stages and points")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of them")
    given = parser.parse_args()
    rows, wrong = [("signal", "stage", *COLUMNS, "wrong")], []
    with tempfile.TemporaryDirectory() as made:
        wholes = prepare(Path(made), given.stages.split(","))
        for number, count in ((signal.SIGKILL, given.kills), (signal.SIGTERM, given.terms)):
            for name, account in break_off(Path(made), wholes, count, number, given.seed).items():
                numbers = [str(account.counts[column]) for column in COLUMNS]
                rows.append((number.name, name, *numbers, str(len(account.wrong))))
                wrong += account.wrong
    print("\n".join("  ".join(cell.ljust(9) for cell in row) for row in rows))
    print("\n".join(wrong), file=sys.stderr)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
