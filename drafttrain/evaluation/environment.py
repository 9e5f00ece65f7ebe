"""Where numbers were measured (machine, versions, commit), and the memory that decoding takes."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict

from drafttrain import __version__
from drafttrain.config.command_line import describe_command
from drafttrain.decoding.engine.pool import release_caches

PACKAGES = ("torch", "transformers", "datasets", "sacrebleu", "rouge-score")


class Environment(BaseModel):
    """What a reader needs to judge a timing."""

    model_config = ConfigDict(frozen=True)

    date: str
    command: str
    """As others would type it: without private folders."""
    cpu: str
    cores: int
    threads: int
    """Threads that torch computes with."""
    load: float | None = None
    """Processes that ran or waited in the last minute (load average): more than the threads
    above means that others shared the machine."""
    gpu: str | None
    python: str
    versions: dict[str, str]
    commit: str | None
    """Commit of drafttrain's own repository, `-dirty` with local changes; None if installed."""


def describe_environment(command: str | None = None) -> Environment:
    """The environment of this process; `command` defaults to its command line."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=describe_command(sys.argv) if command is None else command,
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if os.name == "posix" else None,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        python=platform.python_version(),
        versions={"drafttrain": __version__} | {name: version(name) for name in PACKAGES},
        commit=_commit(Path(__file__).parents[2]),
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit(repository: Path) -> str | None:
    if not (repository / ".git").exists():  # installed, or inside somebody else's repository
        return None
    command = ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


Kind = Literal["allocated", "resident"]
EVERY = 0.002
"""Seconds between two looks at the resident memory."""


def memory_kind(device: torch.device) -> Kind:
    """What `peak_growth` counts: torch's own count of the device, or the process's pages."""
    return "allocated" if device.type == "cuda" else "resident"


def peak_growth(work: Callable[[], object], device: torch.device) -> int:
    """Bytes in use at the worst moment of some work, beyond those before it; at least 0.

    On a CUDA device what torch has allocated there; elsewhere the resident memory of the process,
    looked at every few milliseconds. The caches of our engine are emptied first, and so count
    whole. Memory that earlier work has freed is given back to the system first, as far as the C
    library does that; what it keeps is used again and not counted.
    """
    gc.collect()
    release_caches()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    process, ended = psutil.Process(), Event()
    sizes = [process.memory_info().rss]

    def watch() -> None:
        while not ended.wait(EVERY):
            sizes.append(process.memory_info().rss)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work()
        sizes.append(process.memory_info().rss)
    finally:
        ended.set()
        watcher.join()
    return max(sizes) - sizes[0]
