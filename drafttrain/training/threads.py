"""How many CPU threads a process trains with, and which setting decided it."""

from __future__ import annotations

import os

from drafttrain.config.command_line import LAUNCHED


def choose_threads(asked: int | None) -> tuple[int, str]:
    """The number of threads and its source: `train.threads`; else OMP_NUM_THREADS, of a list the
    first number, at most this process's share of the cores; else that share.

    Launchers set OMP_NUM_THREADS to 1 where it is not set, so in a launched process 1 does not
    count.
    """
    if asked is not None:
        return asked, "train.threads"
    share = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    chosen = int(first) if first.isdecimal() else 0
    if chosen > (1 if any(name in os.environ for name in LAUNCHED) else 0):
        return min(chosen, share), "OMP_NUM_THREADS"
    return share, "all this process may use; if other programs run, set train.threads="


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
