"""Safe writing to folders: atomic files, one writer per folder, clear errors for a full disk."""

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

TEMPORARY, LOCK = ".part", ".writing.lock"
UNFINISHED = (".writing-", ".deleting-")
"""Name prefixes of folders that a killed run may leave."""
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is larger than this process may write (ulimit -f)",
}
BROKEN_OFF = ("inline_container.cc", "PytorchStreamWriter", "iostream error")
"""Parts of the errors of torch.save when the system accepts no more bytes."""


class DiskFull(OSError):
    """A file could not be written whole; the message names the folder and the remedy."""


def join_processes() -> PartialState:
    """Joins the processes of a launch. Raises ConfigError if Accelerate sees another number."""
    patience = timedelta(days=7)  # a process waits for the shards of the others
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"), timeout=patience)
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != state.num_processes:
        raise ConfigError(
            f"{launched} processes were launched, but Accelerate sees {state.num_processes}; on a "
            "machine without a GPU use `accelerate launch --cpu`, or set ACCELERATE_USE_CPU=true"
        )
    return state


def only_writer(folder: Path, setting: str = "out", name: str = LOCK) -> FileLock:
    """Acquires the folder's write lock, which ends with its holder. Raises ConfigError if another
    process has it. setting: name of the folder's setting. name: name of the lock file."""
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
    """Yields a temporary path; renames it to `path` if the block succeeds, else deletes it."""
    owner = f"{platform.node()}-{os.getpid()}"  # machines may share the folder
    temporary = path.with_name(f".{path.name}-{owner}{TEMPORARY}")
    try:
        with named_disk_errors(path.parent):
            yield temporary
            complete_files(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(final: Path, writes: bool = True) -> Iterator[Path]:
    """Yields a temporary folder; renames it to `final` if the block succeeds, else deletes it.
    writes: whether this process creates and renames the folder; several may fill it."""
    temporary = final.with_name(f"{UNFINISHED[0]}{final.name}")
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        with named_disk_errors(final.parent):
            yield temporary
            if writes:
                complete_files(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if writes:
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file atomically; creates its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with renamed_when_whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def complete_files(path: Path) -> None:
    """Flushes a file, or all files of a folder, to disk before the final rename, and sets the mode
    of the umask: safetensors creates files that only their owner can read."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~mask)
            with file.open("rb") as written:
                os.fsync(written.fileno())


def check_writable(folder: Path, name: str) -> None:
    """Raises ConfigError if no file can be created in a folder or, if it does not exist, in its
    nearest existing parent. name: the setting and its value, for the message."""
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
    """Converts the errors that libraries raise when the disk is full to DiskFull. Only for atomic
    writers: the message states that finished files are intact."""
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
            f"cannot write to {str(folder)!r}: {reason} ({free:,.1f} MiB free); finished "
            "files are complete; make room and run the same command again, it continues"
        ) from error


def _no_room(error: Exception) -> str | None:
    """Returns why a file could not be written, or None for an unrelated error. safetensors and
    tokenizers have the errno only in their text, torch.save has none at all."""
    if isinstance(error, OSError):
        return NO_ROOM.get(error.errno or 0)
    if number := re.search(r"os error (\d+)", str(error)):
        return NO_ROOM.get(int(number[1]))
    if isinstance(error, RuntimeError) and any(words in str(error) for words in BROKEN_OFF):
        return "a file could not be written to its end"
    return None


def remove_leftovers(folder: Path) -> None:
    """Deletes half-written files of a killed run, including the temporary files of safetensors.
    Must only be called while no other run writes to the folder."""
    for path in (*folder.glob(f".*{TEMPORARY}"), *folder.glob(".tmp??????")):
        path.unlink()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
