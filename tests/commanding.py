"""Runs a command of drafttrain or a recipe in this process."""

from collections.abc import Callable
from functools import cache

import pytest
import typer

from drafttrain import cli

typer.main.get_command = cache(typer.main.get_command)
"""Typer builds all commands anew in every call, which takes 0.1 s."""


def exit_code(main: Callable[[list[str]], None], *arguments: object) -> int:
    """Runs a program with these arguments and returns its exit code."""
    with pytest.raises(SystemExit) as leaving:
        main([str(one) for one in arguments])
    return int(leaving.value.code or 0)


def ended(*arguments: object) -> int:
    """Runs `drafttrain` with these arguments and returns its exit code."""
    return exit_code(cli.main, *arguments)
