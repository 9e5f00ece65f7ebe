"""The command that this process was started with, to tell a user how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import psutil

LAUNCHERS = {"accelerate", "torchrun", "deepspeed"}
LAUNCHER_MODULES = {"accelerate.commands.launch", "torch.distributed.run"}


def launch_command() -> str:
    """As it would be typed; where a launcher started this process, the launcher's command."""
    process = psutil.Process()
    words = process.cmdline()
    for parent in process.parents():
        try:
            above = parent.cmdline()
        except psutil.Error:  # another user's
            break
        if not is_launcher(above):
            break
        words = above
    return shlex.join(without_interpreter(words))


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a command line is that of `accelerate launch` or one of its like."""
    return any(Path(word).name in LAUNCHERS or word in LAUNCHER_MODULES for word in words[:4])


def without_interpreter(words: Sequence[str]) -> Sequence[str]:
    """`/usr/bin/python /usr/bin/accelerate launch` is typed as `accelerate launch`."""
    installed = len(words) > 1 and not words[1].startswith("-") and not words[1].endswith(".py")
    return [Path(words[1]).name, *words[2:]] if installed else words
