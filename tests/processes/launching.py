"""Starts a recipe or a command in separate processes, as torchrun and `accelerate launch` do.

The processes are forked from a server that has done the imports once for all launches of a test
process.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drafttrain.cli import main as drafttrain
from tests.processes import sharded_on_cpu

ROOT = Path(__file__).parents[2]
PRELOADED = [
    "tests.processes.launching",
    "torch.distributed.fsdp",
    "drafttrain.cli",
    "drafttrain.training.loop",
    "drafttrain.evaluation.teacher_forced",
    "drafttrain.data.hidden.cache",
    "tests.faults.kills",
    "recipes.train_acceptance_head",
    "recipes.train_spec_drafter",
    "recipes.train_state_drafter",
    "transformers.models.llama.modeling_llama",
    "transformers.models.marian.modeling_marian",
]
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(PRELOADED)
ON_CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Environment of the processes. Files of launch/ set Accelerate's part themselves."""


@dataclass(frozen=True)
class Launch:
    """A program and its arguments, to run in one or more processes on the CPU."""

    program: str
    """File name of a recipe, or drafttrain."""
    arguments: Sequence[str]
    log: Path
    """File to which the processes' output is appended."""
    processes: int = 1
    file: str | None = None
    """FSDP or DeepSpeed file of launch/."""
    environment: Mapping[str, str] = field(default_factory=dict)


def start(launch: Launch) -> list[multiprocessing.Process]:
    """Starts the processes and returns them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        FORKING.Process(target=_be, args=(launch, rank, port)) for rank in range(launch.processes)
    ]
    for process in processes:
        process.start()
    return processes


def run(launch: Launch, patience: float = 300.0) -> str:
    """Runs a launch and returns its log. Raises AssertionError with the log if a process failed."""
    processes = start(launch)
    try:
        for process in processes:
            process.join(patience)
        codes = [process.exitcode for process in processes]
        printed = launch.log.read_text()
        assert codes == [0] * len(codes), f"exit codes {codes}:\n{printed}"
    finally:
        kill(processes)
    return printed


def kill_nine_when(under_way: Callable[[], bool], launch: Launch, patience: float = 300.0) -> None:
    """Starts a launch and kills all its processes (kill -9) as soon as `under_way()` is true.

    Raises AssertionError with the log if the launch ended by itself or was never under way.
    """
    processes = start(launch)
    try:
        deadline = time.monotonic() + patience
        while not under_way():
            alive = all(process.is_alive() for process in processes)
            assert alive, f"ended before it was killed:\n{launch.log.read_text()}"
            assert time.monotonic() < deadline, f"never under way:\n{launch.log.read_text()}"
            time.sleep(0.01)
    finally:
        kill(processes)
    for process in processes:
        killed = process.exitcode == -signal.SIGKILL
        assert killed, f"ended by itself:\n{launch.log.read_text()}"


def kill(processes: Sequence[multiprocessing.Process]) -> None:
    """Kills the remaining processes (kill -9), all before waiting for any, because a process that
    loses its peers fails by itself."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _be(launch: Launch, rank: int, port: int) -> None:
    """Runs one process of the launch in the project's folder."""
    os.chdir(ROOT)
    log = os.open(launch.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world = launch.processes
    os.environ |= ON_CPU | dict(launch.environment)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if launch.program == "drafttrain":
        sys.argv = [launch.program, *launch.arguments]
        drafttrain()
        return
    recipe = str(ROOT / "recipes" / launch.program)
    if launch.file is not None:
        sys.argv = ["sharded_on_cpu.py", str(ROOT / "launch" / launch.file), recipe]
        sys.argv += launch.arguments
        sharded_on_cpu.main()
        return
    sys.argv = [recipe, *launch.arguments]
    runpy.run_path(recipe, run_name="__main__")
