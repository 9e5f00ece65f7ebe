"""How a command line is recorded and shown: as others would type it, without private folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

ABSOLUTE = re.compile(r"""(?<![^\s="'`\[{(,])~?/[^\s"'`\]}),]*""")
"""An absolute path: a word, or a value in one (KEY=PATH, [PATH,PATH])."""
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
"""Variables that `accelerate launch` and torchrun set in every process that they start."""


def describe_command(words: Sequence[str]) -> str:
    """The words of `sys.argv` as a command: `drafttrain eval ...`, private folders left out."""
    if not words:
        return ""
    file = PurePath(words[0])
    program = file.name
    if file.parent.name in ("recipes", "benchmarks"):
        started = "accelerate launch" if file.parent.name == "recipes" else "python"
        program = f"{started} {file.parent.name}/{file.name}"
    elif file.stem == "drafttrain" or file.parent.name == "drafttrain":
        program = "drafttrain"
    elif file.suffix == ".py":
        program = f"python {file.name}"
    return " ".join([program, *map(hide_folders, words[1:])])


def hide_folders(text: str) -> str:
    """The text with every absolute path cut to its last part; a RUN/final keeps its run."""
    return ABSOLUTE.sub(lambda found: _last_part(found.group()), text)


def without_folders(path: str) -> str:
    """The last part of an absolute path, a RUN/final with its run; other names as they are."""
    return _last_part(path) if PurePath(path).is_absolute() else path


def _last_part(path: str) -> str:
    parts = PurePath(path).parts[1:]
    return "/".join(parts[-2:] if parts[-1:] == ("final",) else parts[-1:]) or path
