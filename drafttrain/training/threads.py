"""Choice of the number of CPU threads for training."""

import os

from drafttrain.config.command_line import LAUNCHED


def choose_threads(setting: int | None) -> tuple[int, str]:
    """Returns the number of threads and its source: `train.threads`; else OMP_NUM_THREADS (of a
    list the first number), at most this process's share of the cores; else that share.

    Launchers set OMP_NUM_THREADS=1 if it is unset, so a launched process ignores the value 1.
    """
    if setting is not None:
        return setting, "train.threads"
    share = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    chosen = int(first) if first.isdecimal() else 0
    if chosen > (1 if any(name in os.environ for name in LAUNCHED) else 0):
        return min(chosen, share), "OMP_NUM_THREADS"
    return share, "all this process may use; if other programs run, set train.threads="


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
