"""Kills stages at random points, runs them again to the end and checks the results."""

import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets

from tests.faults.stages import STAGES, damage, differences, make_inputs, newest_step
from tests.processes.launching import FORKING, ON_CPU

INTERRUPTED = 130
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
"""Audit events of Python's file operations, in addition to `open` for writing."""
PATIENCE = 300.0
"""Seconds after which a child counts as hanging."""


@dataclass(frozen=True)
class Point:
    """When a child gets its signal: after some seconds, or right before its n-th file operation.

    With `torn`, the system kills it (SIGXFSZ) after that operation, when a file that any library
    writes reaches that many bytes.
    """

    seconds: float | None = None
    operation: int | None = None
    torn: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    """Exit status, or the negative number of the signal that ended it."""
    seconds: float
    operations: int
    """Number of file operations in its folder; 0 if it was killed."""
    printed: str


def prepare(base: Path, stages: Sequence[str]) -> dict[str, Ended]:
    """Makes the inputs in `base` and runs each stage once without interruption, in whole/STAGE."""
    make_inputs(base)
    loading = FORKING.Process(target=int)  # starts the server, which imports the libraries
    loading.start()
    loading.join()
    wholes = {}
    for name in stages:
        folder = base / "whole" / name
        folder.mkdir(parents=True)
        wholes[name] = run_stage(name, base, folder)
        assert wholes[name].status == 0 and wholes[name].operations, wholes[name].printed
    return wholes


def break_off(
    base: Path, wholes: dict[str, Ended], signals: int, number: int, seed: int
) -> tuple[Counter, list[str]]:
    """Interrupts runs one to three times at random points, then finishes them.

    Returns, by stage, the numbers of signals sent, of completed runs, and of those whose folders
    equal the uninterrupted one's; and descriptions of failed checks.
    """
    counts, wrong, randomness, sent = Counter(), [], random.Random(seed), 0
    while sent < signals:
        name = randomness.choice(list(wholes))
        work, whole, failed = base / f"{number}-{counts.total()}", base / "whole" / name, []
        work.mkdir()
        for _ in range(min(randomness.randint(1, 3), signals - sent)):
            point = random_point(randomness, wholes[name], number)
            ended = run_stage(name, base, work, point, number)
            if ended.status == 0:
                break  # finished before the signal
            found = damage(name, work, whole) + wrong_end(ended, number, work)
            failed += [f"{name} at {point} in {work.name}: {one}" for one in found]
            sent += 1
            counts[name, "signals"] += 1
        ended, counts[name, "runs"] = run_stage(name, base, work), counts[name, "runs"] + 1
        if ended.status != 0:
            failed.append(f"{name} again in {work.name}: {ended.printed[-1000:]}")
        elif other := differences(work, whole):
            failed.append(f"{name} in {work.name} differs in {', '.join(other[:5])}")
        else:
            counts[name, "identical"] += 1
        wrong += failed
        if not failed:
            shutil.rmtree(work)
    return counts, wrong


def random_point(randomness: random.Random, whole: Ended, number: int) -> Point:
    """Chooses a point by time, by file operation or, for kill -9, in the middle of a file, with
    probability 1/3 each."""
    kind = randomness.choice(("clock", "operation", "torn"))
    if kind == "clock":
        return Point(seconds=randomness.uniform(0.0, whole.seconds))
    operation = randomness.randint(1, whole.operations)
    if kind == "torn" and number == signal.SIGKILL:
        return Point(operation=operation, torn=int(10 ** randomness.uniform(0.0, 3.5)))
    return Point(operation=operation)


def wrong_end(ended: Ended, number: int, work: Path) -> list[str]:
    """Returns what is wrong with how a run ended: killed, or by SIGTERM with one line that says how
    to continue and which checkpoint there is."""
    left = f"left with {ended.status}: {ended.printed[-500:]}"
    if number == signal.SIGKILL:
        return [] if ended.status in (-signal.SIGKILL, -signal.SIGXFSZ) else [left]
    if ended.status == -signal.SIGTERM:  # it had not begun
        return []
    line = (ended.printed.strip().splitlines() or [""])[-1]
    if ended.status != INTERRUPTED or not re.search("interrupted|run the same command", line):
        return [left]
    stopped = re.search(r"stopped at step (\d+)", line)
    if stopped and newest_step(work) != int(stopped[1]):
        return [f"{line!r}, but the newest checkpoint is of step {newest_step(work)}"]
    return []


def run_stage(
    name: str, base: Path, folder: Path, point: Point | None = None, number: int = signal.SIGKILL
) -> Ended:
    """Runs a stage in a child with working directory `folder`; sends it a signal at the point, if
    given."""
    log = base / f"{folder.name}.log"
    counted = log.with_suffix(".operations")
    counted.write_text("0")
    start, point = time.monotonic(), point or Point()
    child = FORKING.Process(target=_live, args=(name, base, folder, log, counted, point, number))
    child.start()
    child.join(PATIENCE if point.seconds is None else point.seconds)
    if child.exitcode is None and point.seconds is not None:
        os.kill(child.pid, number)
        child.join(PATIENCE)
    printed = log.read_text(errors="replace") if log.exists() else ""
    if child.exitcode is None:
        child.kill()
        raise AssertionError(f"a child hung at {point}:\n{printed}")
    seconds = time.monotonic() - start
    return Ended(child.exitcode, seconds, int(counted.read_text()), printed)


def _live(
    name: str, base: Path, folder: Path, log: Path, counted: Path, point: Point, number: int
) -> None:
    """Runs in the child."""
    torn = point.torn is not None  # the limit on file size would also cut the log
    output = os.open(os.devnull if torn else log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= ON_CPU
    datasets.config.HF_DATASETS_CACHE = base / "cache"  # files of the user's are not cut
    os.chdir(folder)
    seen = _watch(folder, point, number)
    try:
        STAGES[name](base)
    except SystemExit as leaving:
        if leaving.code:
            raise
    counted.write_text(str(seen[0]))


def _watch(folder: Path, point: Point, number: int) -> list[int]:
    """Counts this process's file operations in a folder; sends itself a signal before the n-th."""
    inside, seen = f"{folder.absolute()}{os.sep}", [0]  # excludes the harness's files

    def hook(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
        if not (writes or event in CHANGES) or not isinstance(arguments[0], str | os.PathLike):
            return
        if os.path.abspath(os.fspath(arguments[0])).startswith(inside):
            seen[0] += 1
            if seen[0] == point.operation and point.torn is None:
                os.kill(os.getpid(), number)
            if seen[0] == point.operation and point.torn is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (point.torn, point.torn))

    sys.addaudithook(hook)
    return seen
