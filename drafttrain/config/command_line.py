"""How a command line is recorded and shown: as others would type it, without private folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

ABSOLUTE = re.compile(r"""(?<![^\s="'`\[{(,])~?/[^\s"'`\]}),]*""")
"""An absolute path: a word, or a value in one (KEY=PATH, [PATH,PATH])."""
STARTED_BY = {"recipes": "accelerate launch recipes/", "benchmarks": "python benchmarks/"}
"""Folders of drafttrain's repository -> how what lies in them is started."""


def describe_command(words: Sequence[str]) -> str:
    """The words of `sys.argv` as a command: `drafttrain eval ...`, private folders left out."""
    if not words:
        return ""
    program, *arguments = words
    return " ".join([_program(PurePath(program)), *map(hide_folders, arguments)])


def hide_folders(text: str) -> str:
    """The text with every absolute path cut to its last part; a RUN/final keeps its run."""
    return ABSOLUTE.sub(lambda found: _last_part(found.group()), text)


def _last_part(path: str) -> str:
    parts = PurePath(path).parts[1:]
    return "/".join(parts[-2:] if parts[-1:] == ("final",) else parts[-1:]) or path


def _program(file: PurePath) -> str:
    """The installed script, `python -m drafttrain`, a recipe or benchmark, or another script."""
    if file.stem == "drafttrain" or file.parent.name == "drafttrain":
        return "drafttrain"
    if file.parent.name in STARTED_BY:
        return STARTED_BY[file.parent.name] + file.name
    return f"python {file.name}" if file.suffix == ".py" else file.name
