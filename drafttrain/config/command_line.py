"""Records a command line as others would type it, without private folders."""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

ABSOLUTE = re.compile(r"""(?<![^\s="'`\[{(,])~?/[^\s"'`\]}),]*""")
"""Matches an absolute path that is a word or a value in a word (KEY=PATH, [PATH,PATH])."""
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
"""Environment variables that `accelerate launch` and torchrun set in their processes."""


def describe_command(words: Sequence[str]) -> str:
    """Returns `sys.argv` as a command, such as `drafttrain eval ...`, without private folders."""
    if not words:
        return ""
    file = PurePath(words[0])
    program = file.name
    if file.parent.name in ("recipes", "benchmarks"):
        launcher = "accelerate launch" if file.parent.name == "recipes" else "python"
        program = f"{launcher} {file.parent.name}/{file.name}"
    elif file.stem == "drafttrain" or file.parent.name == "drafttrain":
        program = "drafttrain"
    elif file.suffix == ".py":
        program = f"python {file.name}"
    return " ".join([program, *(shlex.quote(hide_folders(word)) for word in words[1:])])


def hide_folders(text: str) -> str:
    """Cuts every absolute path in a text to its last part, or to RUN/final."""
    return ABSOLUTE.sub(lambda match: _last_part(match.group()), text)


def without_folders(path: str) -> str:
    """Cuts an absolute path to its last part, or to RUN/final; other names are unchanged."""
    return _last_part(path) if PurePath(path).is_absolute() else path


def _last_part(path: str) -> str:
    parts = PurePath(path).parts[1:]
    return "/".join(parts[-2:] if parts[-1:] == ("final",) else parts[-1:]) or path
