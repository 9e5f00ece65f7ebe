"""Break off small runs at random points and account for what is left.

    python -m tests.faults --kills 100 --terms 30 --seed 0
    unshare --map-root-user --mount python -m tests.faults --kills 0 --terms 0 --disks 20

Runs of distillation, training, caching and export get kill -9 (or SIGTERM) after a random time,
right before a random one of their file operations, or in the middle of a file, one to three times;
then they are run to the end. With --disks they run on a disk that fills up (in memory, mounted by
whoever may), and once more with room. Nothing may be lost or doubled, and the result must be that
of an uninterrupted run, byte for byte. Exit code 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.faults.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from tests.faults.kills import Account, break_off, prepare  # noqa: E402
from tests.faults.small_disk import fill_disks  # noqa: E402
from tests.faults.stages import STAGES  # noqa: E402

COLUMNS = ("signals", "runs", "lost", "doubled", "identical")


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as made:
        base = Path(made) / "base" if arguments.folder is None else arguments.folder
        wholes = prepare(base, arguments.stages.split(","))
        results: dict[str, dict[str, Account]] = {}
        for number, count in (
            (signal.SIGKILL, arguments.kills),
            (signal.SIGTERM, arguments.terms),
        ):
            accounts = results.setdefault(number.name, {})
            for stage, account in break_off(base, wholes, count, number, arguments.seed):
                accounts[stage] = account
                sent = sum(one.signals for one in accounts.values())
                print(f"{number.name} {sent}/{count} {stage}", file=sys.stderr, flush=True)
        if arguments.disks:
            accounts = results.setdefault("full disk", {})
            for stage, account in fill_disks(base, wholes, arguments.disks, arguments.seed):
                accounts[stage] = account
                print(f"full disk {stage}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({n: {s: asdict(a) for s, a in r.items()} for n, r in results.items()}))
    else:
        print(table(results))
    wrong = [x for accounts in results.values() for a in accounts.values() for x in a.wrong]
    print("\n".join(wrong), file=sys.stderr)
    raise SystemExit(1 if wrong else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=100, help="kill -9: how many")
    parser.add_argument("--terms", type=int, default=30, help="SIGTERM: how many")
    parser.add_argument("--disks", type=int, default=0, help="disks that fill up: how many")
    parser.add_argument("--seed", type=int, default=0, help="of stages and points")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--folder", type=Path, help="a new folder to work in; it is kept")
    return parser.parse_args()


def table(results: dict[str, dict[str, Account]]) -> str:
    """One line a signal and stage."""
    titles = ("signal", "stage", "signals", "runs", "rows lost", "doubled", "identical", "wrong")
    lines = [titles]
    for name, accounts in results.items():
        for stage, account in sorted(accounts.items()):
            numbers = [str(getattr(account, column)) for column in COLUMNS]
            lines.append((name, stage, *numbers, str(len(account.wrong))))
        sums = [str(sum(getattr(a, column) for a in accounts.values())) for column in COLUMNS]
        lines.append((name, "all", *sums, str(sum(len(a.wrong) for a in accounts.values()))))
    return "\n".join("  ".join(cell.ljust(9) for cell in line) for line in lines)


if __name__ == "__main__":
    main()
