"""Kills a command with SIGKILL in the middle of its work."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def kill_nine_when(
    under_way: Callable[[], bool],
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    patience: float = 120.0,
) -> None:
    """Starts a command and kills it (kill -9) as soon as `under_way()` is true.

    Raises AssertionError, with the command's output, if it ended by itself or was never under way.
    """
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        try:
            deadline = time.monotonic() + patience
            while not under_way():
                assert process.poll() is None, f"ended before it was killed:\n{log.read_text()}"
                assert time.monotonic() < deadline, f"never under way:\n{log.read_text()}"
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == -signal.SIGKILL, f"ended by itself:\n{log.read_text()}"
