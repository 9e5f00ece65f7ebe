"""How a command or a recipe is run: what it prints on mistakes and interruptions, its exit code."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import typer

from drafttrain.commands.options import takes_settings
from drafttrain.config.base import Config, Interrupted
from drafttrain.config.command_line import LAUNCHED

USER_ERROR, BUG, INTERRUPTED = 2, 1, 130
"""Exit codes."""

FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
"""What the system answers where a folder cannot be written or a file not be read."""

LAUNCHER = os.getppid()
"""The program that started this one."""
LAST_WORD = """
import sys, time, psutil
try:
    launcher = psutil.Process(int(sys.argv[1]))
    for _ in range(200):
        if launcher.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
except psutil.NoSuchProcess:
    pass
print(sys.argv[2], file=sys.stderr)
"""
"""A program that prints our line again once `accelerate launch` or torchrun has ended, which print
tracebacks of their own after it."""

TYPER_STYLE: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def recipe_command(
    kind: type[Config], file: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a recipe's function into a command with the same errors and exit codes as drafttrain.

    The function is called as takes_settings says, with settings of the kind; the file is read where
    --config is not given. The help is the module's own docstring, which says how to launch it.
    """

    def wrap(recipe: Callable[..., None]) -> Callable[..., None]:
        module = sys.modules[recipe.__module__]
        single = typer.Typer(**TYPER_STYLE)
        paragraphs = str(module.__doc__).replace("\n\n", "\n\n\b\n")
        single.command(help=f"\b\n{paragraphs}")(takes_settings(kind, {}, file=file)(recipe))

        @wraps(recipe)
        def run(arguments: Sequence[str] | None = None, name: str = "") -> None:
            quiet_libraries()
            given = sys.argv[1:] if arguments is None else arguments
            name = name or Path(str(module.__file__)).name
            run_command(single, name, given, resumable=True)

        return run

    return wrap


def call(function: str, *arguments: Any) -> Any:
    """Import what a dotted path names, as `drafttrain.commands.tune:tune`, and call it."""
    quiet_libraries()
    return resolve_name(function)(*arguments)


def run_command(
    command: typer.Typer, name: str, arguments: Sequence[str], resumable: bool = False
) -> None:
    """Run a command; mistakes in input end in one line on standard error and exit code 2.

    resumable: run again, it continues. SIGTERM ends any command as Ctrl-C does.
    """
    came: list[int] = []
    interrupted = "interrupted" + "; run the same command again to continue" * resumable

    def interrupt(number: int, _: object) -> None:
        came.append(number)
        if number == signal.SIGTERM:  # a launcher may send it again: leaving has begun
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        code = command(args=arguments, prog_name=name, standalone_mode=False)
    except typer.TyperException as error:
        _fail(name, error.format_message(), USER_ERROR)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Interrupted as interruption:
        _fail(name, str(interruption), INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        if came:  # a library made an error of its own of the interruption
            _fail(name, interrupted, INTERRUPTED)
        if isinstance(error, ValueError | OSError):
            _fail(name, in_words(error), USER_ERROR)
        _fail(name, f"{type(error).__name__}: {error} (a bug; --debug shows where)", BUG)
    if code == INTERRUPTED:
        _fail(name, interrupted, INTERRUPTED)
    raise SystemExit(code or 0)


def in_words(error: ValueError | OSError) -> str:
    """A mistake, with the remedy where the system itself forbids a file."""
    if isinstance(error, OSError) and error.errno in FORBIDDEN:
        return f"{error.filename!r}: {error.strerror}; give another folder, or permit it"
    return str(error)


def _fail(name: str, message: str, code: int) -> NoReturn:
    line = f"{name}: {' '.join(message.split())}"
    print(line, file=sys.stderr)
    if any(variable in os.environ for variable in LAUNCHED) and os.getppid() == LAUNCHER:
        words = [sys.executable, "-c", LAST_WORD, str(LAUNCHER), line]
        subprocess.Popen(words, start_new_session=True)
    raise SystemExit(code) from None


def quiet_libraries() -> None:
    """No progress bars of weight loading and no advice from libraries between our own lines."""
    os.environ["MPLBACKEND"] = "agg"  # plots are files; a notebook's choice may lack its package
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")  # not used
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we print errors
    datasets.disable_progress_bars()
