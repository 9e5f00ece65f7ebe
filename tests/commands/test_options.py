"""Options set their settings and have the settings' help texts and defaults."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from drafttrain import cli
from drafttrain.commands.options import DryRun, option_help, takes_settings
from drafttrain.config.base import Config, ConfigError
from tests.commanding import ended

VERBS = ["distill", "cache", "bigrams", "eval", "generate", "export", "tune"]
COMMANDS = {"eval": "evaluate"}
"""Function names of verbs that differ from the verb."""


class Group(Config):
    path: str
    """A place."""
    sizes: tuple[int, ...] = ()
    """Sizes."""


class Settings(Config):
    group: Group
    """Default: somewhere."""
    swap: bool = False
    """Whether."""
    values: dict[str, int] = {}
    """Values."""


def parsed(*arguments: str) -> list[object]:
    """Returns the arguments that a command receives."""
    got: list[object] = []
    app = typer.Typer()
    flags = {"--a-group": "group.path", "--swap": "swap", "--value": "values"}

    @app.command()
    @takes_settings(Settings, flags)
    def command(settings: Settings, dry_run: DryRun = False) -> None:
        got.extend([settings, dry_run])

    app(args=list(arguments), standalone_mode=False)
    return got


def test_options_set_their_settings():
    arguments = ["--a-group", "x", "--swap", "--value", "a=1", "--value", "b=2", "--dry-run"]
    group = Group(path="x", sizes=(1, 2))
    settings = Settings(group=group, swap=True, values={"a": 1, "b": 2})
    assert parsed(*arguments, "group.sizes=[1,2]") == [settings, True]
    with pytest.raises(ConfigError, match="values 'a' is not NAME=VALUE"):
        parsed("--a-group", "x", "--value", "a")


def test_options_and_overrides_win_over_the_file_and_must_agree(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("group: {path: file, sizes: [1]}\nswap: true\n")
    [settings, dry_run] = parsed("--config", str(file), "group.path=given", "group.sizes=[2]")
    assert settings.group == Group(path="given", sizes=(2,)) and settings.swap and not dry_run
    [settings, _] = parsed("--config", str(file), "group.path=option", "--a-group", "option")
    assert settings.group == Group(path="option", sizes=(1,))
    file.write_text("group: {path: file}\nvalues: {a: 1, b: 2}\n")
    [settings, _] = parsed("--config", str(file), "--value", "b=3")
    assert settings.values == {"a": 1, "b": 3}
    for given in ("group.path=given", "group={path: given}"):
        with pytest.raises(ConfigError, match=r"group\.path = given, but its option is option"):
            parsed("--config", str(file), given, "--a-group", "option")


def test_given_settings_are_checked_before_defaults():
    def fill(values: dict) -> dict:
        raise AssertionError("not reached")

    command = takes_settings(Settings, {}, fill)(lambda settings: None)
    with pytest.raises(ConfigError, match="unknown setting 'of'"):
        command(overrides=["of=1"], config=None)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("group.path", "Default: somewhere. A place. (group.path)"),
        ("group.sizes", "Sizes. (group.sizes)"),
        ("swap", "Whether. (swap)"),
    ],
)
def test_help_is_the_description_with_that_of_the_group_and_the_name(setting, says):
    assert option_help(Settings, setting) == says


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_the_terminal_and_leaves_no_option_unexplained(
    capsys, monkeypatch, verb, columns
):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", columns)
    assert ended(verb, "--help") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) == columns
    assert not any("…" in line for line in lines)
    examples = lines[lines.index(" Examples:") + 1 : lines.index("", lines.index(" Examples:"))]
    printed = inspect.cleandoc(cli.__dict__[COMMANDS.get(verb, verb)].__doc__).splitlines()
    assert [line.strip() for line in examples] == [
        line.strip() for line in printed[printed.index("Examples:") + 1 :]
    ]
    options = [line.strip("│ ").split() for line in lines if line.startswith("│ --")]
    assert len(options) >= 4
    assert [words for words in options if len(words) < 3] == []


LIGHT = """
import sys
from drafttrain.cli import main
for line in (
    "eval --help",
    "eval max_new_tokens=5",
    "eval --sweep k=0 --target t --drafter none --data d",
    "export --drafter d",
    "generate --text a --target t --drafter none data.path=d",
):
    try:
        main(line.split())
    except SystemExit as end:
        heavy = {"torch", "transformers", "datasets", "numpy", "matplotlib"} & set(sys.modules)
        assert (end.code, heavy) == (0 if "--help" in line else 2, set()), line
"""


def test_a_wrong_setting_is_answered_before_torch_is_imported(tmp_path):
    environment = {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    program = [sys.executable, "-c", LIGHT]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_python_m_drafttrain_is_the_command():
    program = [sys.executable, "-m", "drafttrain", "eval", "badkey=1"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("drafttrain: unknown setting 'badkey'; known here: baselines, ")
