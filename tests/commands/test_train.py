"""`drafttrain train` finds recipes, runs them in one process, and ends as all commands do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafttrain.commands.train import find_recipe, script_of
from tests.commanding import ended
from tests.recipes.tiny_recipe import language_project

ROOT = Path(__file__).parents[2]
RECIPES = [one for one in ROOT.glob("recipes/*.yaml") if "\nrun:" in one.read_text()]
LAUNCHER = """
import subprocess, sys
code = subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode
print("Traceback", file=sys.stderr)
print("code", code, file=sys.stderr)
"""
FAILING = """
import typer
from drafttrain.commands.shell import run_command
app = typer.Typer()
@app.command()
def fail() -> None:
    raise ValueError("train.seed is wrong")
run_command(app, "recipe.py", [])
"""


@pytest.mark.parametrize("name", ["causal-drafter", "causal_drafter", "train_causal_drafter"])
def test_a_script_is_found_by_its_name_in_any_folder(name, capsys, tmp_path, monkeypatch):
    given = language_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert ended("train", name, *given, "--dry-run") == 0
    assert "steps        6; batches per step: 1" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_file_of_settings_names_its_script(capsys, tmp_path):
    file = Path(language_project(tmp_path)[-1])
    assert ended("train", file, "--dry-run") == 2
    assert "train spec-drafter --config" in capsys.readouterr().err
    file.write_text(f"#   accelerate launch recipes/train_causal_drafter.py\n{file.read_text()}")
    assert ended("train", file, "--dry-run", "train.max_steps=4") == 0
    assert "steps        4; batches per step: 1" in capsys.readouterr().out
    for other in (["--config", file], [f"--config={file}"]):
        assert ended("train", file, *other, "--dry-run") == 2
        assert "--config is given too; give one of the two" in capsys.readouterr().err


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_is_found_by_its_name(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = find_recipe(file.stem.replace("_", "-"))
    assert found == file and script_of(found).is_file()


def test_an_interrupted_recipe_ends_with_130(capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("drafttrain.commands.options.load_settings", interrupt)
    assert ended("train", "quickstart") == 130
    assert "run the same command again" in capsys.readouterr().err


def test_debug_shows_the_traceback_of_a_recipe(monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("drafttrain.commands.options.load_settings", fail)
    with pytest.raises(KeyError, match="lost"):
        ended("train", "--debug", "quickstart")


def test_under_a_launcher_our_line_is_the_last(tmp_path):
    variables = os.environ | {"ACCELERATE_MIXED_PRECISION": "no", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, FAILING]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    line = "recipe.py: train.seed is wrong"
    assert done.stderr.splitlines() == [line, "Traceback", "code 2", line]


def test_a_wheel_has_recipes_and_launch_files(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={tmp_path}"]
    command += ["build_py", f"--build-lib={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for folder in ("recipes", "launch"):
        built = {one.name for one in (tmp_path / "drafttrain" / folder).iterdir()}
        files = {one.name for one in (ROOT / folder).glob("[a-z]*.[psy]*")}
        assert files <= built
