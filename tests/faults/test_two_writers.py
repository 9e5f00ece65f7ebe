"""Two processes and one run folder: the second is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.shards.writing import LOCK
from drafttrain.training.run_folder import open_run

HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
"""Another process that holds a lock; it loads no large library, to be quick."""


def test_a_run_is_refused_while_another_process_works_on_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    open_run(tmp_path / "other", ObjectiveConfig())  # a run of its own is nobody's business
    run.mkdir()
    command = [sys.executable, "-c", HOLD, str(run / LOCK)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"writing to '{run}'.* another folder with run="):
            open_run(run, ObjectiveConfig())
        assert [path.name for path in run.iterdir()] == [LOCK]
        holder.kill()
    open_run(run, ObjectiveConfig())  # the system dropped the lock of the killed process
    open_run(run, ObjectiveConfig())  # this process may open its own run again


def test_a_killed_runs_half_written_files_are_removed(tmp_path: Path) -> None:
    half = tmp_path / "checkpoints" / ".writing-step-00000007"
    half.mkdir(parents=True)
    (half / "weights.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints" / ".deleting-step-00000001").mkdir()
    (tmp_path / "checkpoints" / "step-00000006").mkdir()
    with FileLock(tmp_path / LOCK), pytest.raises(ConfigError, match="another process"):
        open_run(tmp_path, ObjectiveConfig())
    assert half.exists()  # the other process may be writing it
    open_run(tmp_path, ObjectiveConfig())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]
