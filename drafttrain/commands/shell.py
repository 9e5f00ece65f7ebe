"""Runs commands and recipes: error messages, interruptions and exit codes."""

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
"""Error numbers for files and folders that may not be read or written."""
LAUNCHER = os.getppid()
"""Process id of the parent process."""
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
"""A program that prints our error line again after `accelerate launch` or torchrun has ended, which
print tracebacks after it."""
TYPER_STYLE: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def recipe_command(
    kind: type[Config], file: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a recipe's function into a command with the errors and exit codes of `drafttrain`.

    See `takes_settings` for kind and file. The help is the docstring of the recipe's module.
    """

    def wrap(recipe: Callable[..., None]) -> Callable[..., None]:
        module = sys.modules[recipe.__module__]
        single = typer.Typer(**TYPER_STYLE)
        paragraphs = str(module.__doc__).replace("\n\n", "\n\n\b\n")
        single.command(help=f"\b\n{paragraphs}")(takes_settings(kind, {}, file=file)(recipe))

        @wraps(recipe)
        def run(arguments: Sequence[str] | None = None, name: str = "") -> None:
            quiet_libraries()
            arguments = sys.argv[1:] if arguments is None else arguments
            name = name or Path(str(module.__file__)).name
            run_command(single, name, arguments, resumable=True)

        return run

    return wrap


def call(function: str, *arguments: Any) -> Any:
    """Imports a function by its path, such as `drafttrain.commands.tune:tune`, and calls it."""
    quiet_libraries()
    return resolve_name(function)(*arguments)


def run_command(
    command: typer.Typer, name: str, arguments: Sequence[str], resumable: bool = False
) -> None:
    """Runs a command and exits; wrong input gives one line on standard error and exit code 2.

    resumable: the command continues when it is run again. SIGTERM ends a command as Ctrl-C does.
    """
    received: list[int] = []
    interrupted = "interrupted" + "; run the same command again to continue" * resumable

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGTERM:  # a launcher may send it again while we exit
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        code = command(args=arguments, prog_name=name, standalone_mode=False, obj=debug)
        if code != INTERRUPTED:
            raise SystemExit(code or 0)
    except typer.TyperException as error:
        _fail(name, error.format_message(), USER_ERROR)
    except KeyboardInterrupt:
        pass
    except Interrupted as interruption:
        _fail(name, str(interruption), INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        if not received:  # else a library has turned the interruption into another error
            if isinstance(error, ValueError | OSError):
                _fail(name, in_words(error), USER_ERROR)
            _fail(name, f"{type(error).__name__}: {error} (a bug; --debug shows where)", BUG)
    _fail(name, interrupted, INTERRUPTED)


def in_words(error: ValueError | OSError) -> str:
    """Returns the error message; adds a remedy if the system denied access to a file."""
    if isinstance(error, OSError) and error.errno in FORBIDDEN:
        return f"{error.filename!r}: {error.strerror}; give another folder or change permissions"
    return str(error)


def _fail(name: str, message: str, code: int) -> NoReturn:
    line = f"{name}: {' '.join(message.split())}"
    print(line, file=sys.stderr)
    if any(variable in os.environ for variable in LAUNCHED) and os.getppid() == LAUNCHER:
        words = [sys.executable, "-c", LAST_WORD, str(LAUNCHER), line]
        subprocess.Popen(words, start_new_session=True)
    raise SystemExit(code) from None


def quiet_libraries() -> None:
    """Turns off progress bars and advice from libraries, so that only our lines are printed."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook's backend may not be installed
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")  # not used
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we print errors
    datasets.disable_progress_bars()
