"""How many CPU threads a process trains with, and who said so."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

VARIABLE = "OMP_NUM_THREADS"
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
"""Variables that `accelerate launch` and torchrun set in every process that they start."""


@dataclass(frozen=True)
class Threads:
    """A number of threads, and where it comes from, in words."""

    count: int
    source: str

    def __str__(self) -> str:
        return f"{self.count} CPU thread{'s' if self.count > 1 else ''} ({self.source})"


def choose_threads(asked: int | None) -> Threads:
    """What `train.threads` asks for; else OMP_NUM_THREADS where the user set it, at most this
    process's share of the cores; else that share."""
    if asked is not None:
        return Threads(asked, "train.threads")
    share = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    told = told_threads(os.environ, _launcher_environment)
    if told is not None:
        return Threads(min(told, share), VARIABLE)
    return Threads(share, "all this process may use; beside other programs set train.threads=")


def told_threads(
    environment: Mapping[str, str], of_launcher: Callable[[], Mapping[str, str]]
) -> int | None:
    """The threads that OMP_NUM_THREADS says, where it is the user's word.

    Launchers set it to 1 where it is not set (Accelerate to the physical cores where it is
    configured for a CPU), so in a launched process 1 counts only if the launcher itself was started
    with it.
    """
    told = _first_number(environment)
    launched = any(name in environment for name in LAUNCHED)
    if told == 1 and launched and _first_number(of_launcher()) != 1:
        return None
    return told


def usable_cores() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _first_number(environment: Mapping[str, str]) -> int | None:
    """OpenMP takes a list, of which the first is meant; what is no number it ignores."""
    first = environment.get(VARIABLE, "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def _launcher_environment() -> Mapping[str, str]:
    """What the parent of this process was started with; empty where that cannot be read."""
    try:
        return psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return {}
