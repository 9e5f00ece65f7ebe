"""Memory that decoding takes beyond what the models hold anyway."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable
from threading import Event, Thread
from typing import Literal

import psutil
import torch

from drafttrain.decoding.engine.pool import release_caches

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
    _give_back()
    process = psutil.Process()
    before = most = process.memory_info().rss
    ended = Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(EVERY):
            most = max(most, process.memory_info().rss)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        most = max(most, process.memory_info().rss)
        ended.set()
        watcher.join()
    return max(0, most - before)


def _give_back() -> None:
    """Return freed memory to the system, where the C library can be told to."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
