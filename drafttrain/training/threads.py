"""How many CPU threads a process trains with, and which setting decided it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import psutil

from drafttrain.config.command_line import LAUNCHED


def choose_threads(asked: int | None) -> tuple[int, str]:
    """The number of threads and its source: `train.threads`; else OMP_NUM_THREADS where the user
    set it, at most this process's share of the cores; else that share."""
    if asked is not None:
        return asked, "train.threads"
    share = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    chosen = threads_of_user(os.environ, _launcher_environment)
    if chosen is not None:
        return min(chosen, share), "OMP_NUM_THREADS"
    return share, "all this process may use; if other programs run, set train.threads="


def threads_of_user(
    environment: Mapping[str, str], of_launcher: Callable[[], Mapping[str, str]]
) -> int | None:
    """OMP_NUM_THREADS where the user set it; of a list the first number, as OpenMP takes it.

    Launchers set it to 1 where it is not set, so in a launched process 1 counts only if the
    launcher itself was started with it.
    """

    def number(variables: Mapping[str, str]) -> int | None:
        first = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        return int(first) if first.isdecimal() and int(first) > 0 else None

    found = number(environment)
    launched = any(name in environment for name in LAUNCHED)
    return None if found == 1 and launched and number(of_launcher()) != 1 else found


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _launcher_environment() -> Mapping[str, str]:
    """What the parent of this process was started with; empty where that cannot be read."""
    try:
        return psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return {}
