"""Several processes write shards into one folder: whole files, one owner, no half-written ones."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from filelock import FileLock, Timeout

from drafttrain.config.base import ConfigError

TEMPORARY = ".part"
SAFETENSORS_TEMPORARY = ".tmp??????"
LOCK = ".writing.lock"
PATIENCE = timedelta(days=7)
"""How long a process waits for the others' shards."""
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is larger than this process may write (ulimit -f)",
}
BROKEN_OFF = ("inline_container.cc", "PytorchStreamWriter", "iostream error")
"""What torch.save says when the system takes no more bytes."""


class DiskFull(OSError):
    """A file could not be written whole; the message names the folder and the remedy."""


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


def only_writer(folder: Path, setting: str = "out", name: str = LOCK) -> FileLock:
    """A lock that the operating system drops when its holder dies. Raises ConfigError if held.

    setting: the one that names the folder. name: of the file that is locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process is writing to {str(folder)!r} ({name} is locked); wait until it "
            f"ends, stop it, or give another folder with {setting}="
        ) from None
    return lock


@contextmanager
def renamed_when_whole(path: Path) -> Iterator[Path]:
    """A temporary path that gets its final name when the block ends well, else disappears."""
    owner = f"{platform.node()}-{os.getpid()}"  # machines may share the folder
    temporary = path.with_name(f".{path.name}-{owner}{TEMPORARY}")
    try:
        with named_disk_errors(path.parent):
            yield temporary
            complete_files(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, and the folders above it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with renamed_when_whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def complete_files(path: Path) -> None:
    """Give a file, or all files of a folder, the umask's mode, and put them on the disk, before a
    rename declares them complete. safetensors makes files for their owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~mask)
            with file.open("rb") as written:
                os.fsync(written.fileno())


def check_writable(folder: Path, name: str) -> None:
    """Raises ConfigError where no file can be made in a folder, or in the nearest one above it that
    there is. name: the setting and its value."""
    nearest = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name}: no file can be written in {str(nearest)!r} ({error.strerror}); give another "
            "folder, or make it writable"
        ) from None


@contextmanager
def named_disk_errors(folder: Path) -> Iterator[None]:
    """Whatever a library raises when the disk is full leaves as DiskFull, in one line.

    Only for writers of whole files: what lay in the folder before must still lie there.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        reason = _no_room(error)
        if reason is None:
            raise
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(nearest).free / 2**20
        raise DiskFull(
            f"cannot write to {str(folder)!r}: {reason} ({free:,.1f} MiB free); what was finished "
            "there is whole; make room and run the same command again, it continues"
        ) from error


def _no_room(error: Exception) -> str | None:
    """Why there was no room, or None if the error is another one.

    safetensors and tokenizers give the system's number in their text only, torch.save none at all.
    """
    if isinstance(error, OSError):
        return NO_ROOM.get(error.errno or 0)
    if number := re.search(r"os error (\d+)", str(error)):
        return NO_ROOM.get(int(number[1]))
    if isinstance(error, RuntimeError) and any(words in str(error) for words in BROKEN_OFF):
        return "a file could not be written to its end"
    return None


def remove_leftovers(folder: Path) -> None:
    """Deletes half-written files of a run that was killed, also those that safetensors makes next
    to the file it writes, under names of its own. Only while no other run writes them."""
    for pattern in (f".*{TEMPORARY}", SAFETENSORS_TEMPORARY):
        for path in folder.glob(pattern):
            path.unlink()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
