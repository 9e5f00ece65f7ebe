"""Every wrong input is answered in one line, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from drafttrain.cli import main
from drafttrain.config.base import ConfigError
from tests.wrong_input_cases import WrongInput
from tests.wrong_input_lines import (
    DOCUMENT,
    RECIPES,
    Refusal,
    contents,
    document,
    isolated,
    refuse,
)
from tests.wrong_input_project import make_project
from tests.wrong_inputs import WRONG_INPUTS

COMMANDS = ("distill", "cache", "eval", "tune", "tune-cascade", "generate", "export")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("project")
    with contextlib.chdir(root), contextlib.redirect_stderr(io.StringIO()):
        yield make_project(root)


@cache
def refused(case: WrongInput) -> tuple[Refusal, dict[str, str], dict[str, str]]:
    """How a wrong input ended, and what was in the project before and after."""
    before = contents(Path.cwd())
    return refuse(case), before, contents(Path.cwd())


@pytest.mark.parametrize("case", WRONG_INPUTS, ids=lambda case: case.line)
def test_wrong_input_ends_in_one_line_and_writes_nothing(project, case):
    refusal, before, after = refused(case)
    assert after == before
    assert refusal.code == 2, refusal.error
    assert refusal.out == ""
    [line] = refusal.error.splitlines()
    assert line.startswith(f"{case.line.split()[0]}: ")
    for words in case.says:
        assert words in line
    assert bool(refusal.loaded) == case.weights, refusal.loaded


def test_every_command_and_recipe_has_wrong_inputs():
    lines = [case.line for case in WRONG_INPUTS]
    assert len(set(lines)) == len(lines) >= 60
    programs = [f"drafttrain {command} " for command in COMMANDS] + [f"{name} " for name in RECIPES]
    for program in programs:
        assert sum(line.startswith(program) for line in lines) >= 5, program


def test_the_document_shows_these_inputs_and_their_lines(project):
    file = Path(__file__).parents[1] / DOCUMENT
    shown = document({case: refused(case)[0] for case in WRONG_INPUTS}, project)
    again = f"write it anew: python -m tests.wrong_input_lines > {DOCUMENT}"
    assert file.read_text(encoding="utf-8").splitlines() == shown.splitlines(), again


@pytest.mark.parametrize("command", [*COMMANDS, *RECIPES])
def test_debug_shows_the_traceback(project, command):
    program = RECIPES.get(command, main)
    arguments = ["--debug", "--config", "torn.yaml"]
    with isolated(), pytest.raises(ConfigError, match=r"torn\.yaml is not valid YAML"):
        program(arguments if command in RECIPES else [command, *arguments])


@pytest.mark.parametrize("command", [*COMMANDS, *RECIPES])
def test_help_names_debug(capsys, command):
    with pytest.raises(SystemExit) as ended:
        RECIPES.get(command, main)(["--help"] if command in RECIPES else [command, "--help"])
    assert ended.value.code == 0
    assert "--debug" in capsys.readouterr().out


def test_a_run_that_is_refused_leaves_the_working_directory(project):
    refuse(next(case for case in WRONG_INPUTS if case.place != "."))
    assert os.getcwd() == str(project)
