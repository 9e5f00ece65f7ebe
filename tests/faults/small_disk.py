"""Stages on a disk that fills up: a named error, what was finished intact, then more room."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.forks import call_in_child, run_in_child
from tests.faults.kills import Account, Whole, finish
from tests.faults.stages import STAGES, Stage, damage

DISK = 128 * 2**20
PAGE = 4096
"""Bytes that the smallest file takes."""
NAMED = ("cannot write to", "could not be written", "MiB are free there")
"""What the one line says that a starved run leaves with."""


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of 128 MiB in memory. Raises OSError where this process may not mount one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(
            f"{done.stderr.strip()}; start with: unshare --map-root-user --mount "
            "python -m tests.faults --disks N"
        )
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_disks(
    base: Path, wholes: dict[str, Whole], disks: int, seed: int
) -> Iterator[tuple[str, Account]]:
    """Yields the stage and the account of its runs so far.

    A run has room for a random part of what it writes; once it has failed, the disk is emptied of
    what filled it, and the run goes on.
    """
    randomness = random.Random(seed)
    accounts = {name: Account() for name in wholes}
    with small_disk(base / "disk") as disk:
        for trial in range(disks):
            name = list(wholes)[trial % len(wholes)]
            work, filler = disk / f"disk-{trial}", disk / "filler"
            work.mkdir()
            free = randomness.uniform(0.05, 0.95) * most_bytes(wholes[name].folder)
            _fill(filler, shutil.disk_usage(disk).free - int(free) // PAGE * PAGE)
            _starve(base, work, STAGES[name], wholes[name], filler, accounts[name])
            if not accounts[name].wrong:
                shutil.rmtree(work)
            yield name, accounts[name]


def most_bytes(folder: Path) -> int:
    """Bytes that a finished stage takes on disk, every file whole pages."""
    return sum(-(-p.stat().st_size // PAGE) * PAGE for p in folder.rglob("*") if p.is_file())


def _fill(filler: Path, size: int) -> None:
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _starve(
    base: Path, work: Path, stage: Stage, whole: Whole, filler: Path, account: Account
) -> None:
    """One run on the full disk, and once more after room was made."""
    ended = run_in_child(lambda: stage.run(base), work, base / f"{work.name}.log")
    filler.unlink()
    last = ended.said.strip().splitlines()[-1] if ended.said.strip() else ""
    if ended.status != 0:
        account.signals += 1
        if ended.status != 2 or not any(words in last for words in NAMED):
            account.wrong.append(f"{stage.name} in {work.name} left with {ended.status}: {last}")
        wrong = call_in_child(lambda: damage(stage, work, whole.folder), base)
        account.wrong += [f"{stage.name} in {work.name}: {one}" for one in wrong]
    finish(base, work, stage, whole, account)
