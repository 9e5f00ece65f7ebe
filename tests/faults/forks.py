"""Child processes, forked after the libraries are loaded and killed at chosen points."""

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
"""Audit events of Python's file operations, in addition to `open` for writing."""
FORK = multiprocessing.get_context("fork")
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

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"{self.seconds:.2f} s"
        return f"file op {self.operation}" + (f", {self.torn} bytes on" if self.torn else "")


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    """Exit status, or the negative number of the signal that ended it."""
    seconds: float
    operations: int | None
    """Number of file operations in its folder; None if it was killed."""
    printed: str


def run_in_child(
    work: Callable[[], None], folder: Path, log: Path, point: Point | None = None, number: int = 9
) -> Ended:
    """Runs `work` in a forked child with working directory `folder`; sends it signal `number` at
    the point, if given."""
    counted = log.with_suffix(".operations")
    counted.unlink(missing_ok=True)
    log.write_text("")
    start, point = time.monotonic(), point or Point()
    child = FORK.Process(target=_live, args=(work, folder, log, counted, point, number))
    child.start()
    child.join(PATIENCE if point.seconds is None else point.seconds)
    if child.exitcode is None and point.seconds is not None:
        os.kill(child.pid, number)
        child.join(PATIENCE)
    if child.exitcode is None:
        child.kill()
        raise AssertionError(f"a child hung at {point}:\n{log.read_text()}")
    operations = int(counted.read_text()) if counted.exists() else None
    printed = log.read_text(errors="replace")
    return Ended(child.exitcode, time.monotonic() - start, operations, printed)


def call_in_child(function: Callable[[], Any], folder: Path) -> Any:
    """Computes a function in a child and returns its result through JSON; this process keeps its
    state."""
    answer = folder / "answer.json"

    def work() -> None:
        answer.write_text(json.dumps(function()))

    ended = run_in_child(work, folder, folder / "call.log")
    assert ended.status == 0, ended.printed
    return json.loads(answer.read_text())


def _live(
    work: Callable[[], None], folder: Path, log: Path, counted: Path, point: Point, number: int
) -> None:
    """Runs in the child."""
    torn = point.torn is not None  # the limit on file size would also cut the log
    output = os.open(os.devnull if torn else log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    seen = _watch(folder, point, number)
    try:
        work()
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
