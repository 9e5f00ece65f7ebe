"""Where numbers were measured (machine, versions, commit), and the memory that decoding takes."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

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


def peak_growth(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that torch has allocated on a CUDA device at the worst moment of some work, beyond
    those before it; the engine's own caches are emptied first. None on another device, where work
    is not done at all."""
    if device.type != "cuda":
        return None
    gc.collect()
    release_caches()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)
