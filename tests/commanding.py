"""Runs a command of drafttrain or a recipe in this process."""

from collections.abc import Callable

import pytest

from drafttrain import cli


def exit_code(main: Callable[[list[str]], None], *arguments: object) -> int:
    """Runs a program with these arguments and returns its exit code."""
    with pytest.raises(SystemExit) as leaving:
        main([str(one) for one in arguments])
    return int(leaving.value.code or 0)


def ended(*arguments: object) -> int:
    """Runs `drafttrain` with these arguments and returns its exit code."""
    return exit_code(cli.main, *arguments)
