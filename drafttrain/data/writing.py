"""Several processes write shards into one folder: whole files, one owner, no half-written ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from filelock import FileLock, Timeout

from drafttrain.config import ConfigError

TEMPORARY = ".part"
LOCK = ".writing.lock"
PATIENCE = timedelta(days=7)
"""How long a process waits for the others' shards."""


def join_processes() -> PartialState:
    """All processes of a launch. Raises ConfigError if each believes to be alone."""
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"), timeout=PATIENCE)
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != state.num_processes:
        raise ConfigError(
            f"{launched} processes were launched, but Accelerate sees {state.num_processes}; on a "
            "machine without a GPU use `accelerate launch --cpu`, or set ACCELERATE_USE_CPU=true"
        )
    return state


def only_writer(folder: Path) -> FileLock:
    """A lock that the operating system drops when its holder dies. Raises ConfigError if held."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process is writing to {str(folder)!r} ({LOCK} is locked); wait until it "
            "ends, stop it, or give another folder with out="
        ) from None
    return lock


@contextmanager
def renamed_when_whole(path: Path) -> Iterator[Path]:
    """A temporary path that gets its final name when the block ends well, else disappears."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}{TEMPORARY}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Half-written files of a run that was killed. Only while no other run writes here."""
    for path in folder.glob(f".*{TEMPORARY}"):
        path.unlink()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
