"""The commands in pages, help texts and recipes have valid settings and would run."""

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import pairwise, takewhile

import pytest
import typer

from drafttrain import cli
from drafttrain.commands import options
from drafttrain.commands.train import find_recipe, run_recipe, script_of
from drafttrain.config import commands as verbs
from drafttrain.config import recipes
from drafttrain.config.reading import check_settings, load_settings, merge_values
from tests.test_docs import (
    FOLDERS,
    PAGE,
    ROOT,
    SETTLED_PAGE,
    is_setting,
    python_blocks,
    without_blocks,
)

VERBS = typer.main.get_command(cli.app).commands
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
BENCHMARKS = {
    "benchmarks/grow_target.py": recipes.TargetRecipe,
    "benchmarks/train.py": recipes.SpecDrafterRecipe,
    "benchmarks/tree_experiments.py": verbs.EvalConfig,
}
"""The class of the `key=value` settings of each script."""
OUTPUTS = ("--out", "--report", "--figure", ">")
"""Arguments that precede a file or folder which a command writes."""


@pytest.fixture
def settings_alone(monkeypatch):
    """Makes commands end after they read their settings."""
    monkeypatch.setattr(options, "load_settings", read_and_leave)
    monkeypatch.setattr(cli, "call", lambda *_: None)


@SETTLED_PAGE
def test_commands_take_their_options_settings_and_files(page, settings_alone, capsys):
    check_commands(page.read_text(encoding="utf-8"), capsys)


@SETTLED_PAGE
def test_commands_on_embedded_data_pass_a_dry_run(page, monkeypatch, capsys):
    """A dry run checks the pairing, reads the inputs and plans; it loads no weights."""
    monkeypatch.chdir(ROOT)
    for words in commands(page.read_text(encoding="utf-8")):
        subject, rest = called(words)
        plans = subject in ("eval", "tune", "distill") or str(subject).startswith("recipes/")
        written = {after for word, after in pairwise(rest) if word in OUTPUTS}
        named = " ".join(word for word in rest if word not in written and word[:4] != "run=")
        files = re.findall(r"(?:checkpoints|data|recipes)/[\w./-]+|\b\w+\.(?:jsonl|yaml)\b", named)
        here = files and all((ROOT / one).exists() for one in files)
        if plans and here and not re.search(r"\b[A-Z][A-Z0-9]{2,}\b", named):
            assert not exit_code(subject, [*rest, "--dry-run"]), capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_the_help_are_right(verb, settings_alone, capsys):
    examples = VERBS[verb].help.split("Examples:")[1]
    check_commands("\n\n" + examples.replace("\n  ", "\n      "), capsys)


def test_the_example_of_the_readme_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [code] = python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    exec(code, {})
    assert capsys.readouterr().out.strip().endswith("tokens per target call")


@PAGE
def test_commands_write_only_what_git_ignores(page):
    patterns = re.findall(r"^/(\*\..+)$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    blocks = re.findall(r"```(?:bash|sh)\n.*?```", page.read_text(encoding="utf-8"), re.DOTALL)
    for words in commands("\n".join(blocks)):
        places = [after for word, after in pairwise(words) if word in OUTPUTS]
        places += [word.removeprefix("run=") for word in words if word.startswith("run=")]
        for place in places:
            ignored = "/" not in place and any(fnmatch(place, pattern) for pattern in patterns)
            assert ignored or place.startswith("checkpoints/"), " ".join(words)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_head_of_a_recipe_names_files_and_commands_that_exist(recipe, settings_alone, capsys):
    head = "\n".join(re.findall("^#.*", recipe.read_text(encoding="utf-8"), re.MULTILINE))
    for name in re.findall(rf"\b(?:{FOLDERS})/[\w/-]+\.(?:py|md|yaml)\b", head):
        assert (ROOT / name).exists(), name
    check_commands(re.sub("^#", "  ", head, flags=re.MULTILINE), capsys)


def read_and_leave(kind, file=None, overrides=(), flags=None, fill=None) -> None:
    """Reads settings as a command does, without values from runs, and ends the command."""
    check_settings(kind, merge_values(file, overrides, flags))
    if fill is None:
        load_settings(kind, file, overrides, flags)
    raise SystemExit(0)


def exit_code(subject: str, words: list[str]) -> int | None:
    with pytest.raises(SystemExit) as end:
        if subject.startswith("recipes/"):
            run_recipe(subject, words)
        else:
            cli.main([subject, *words])
    return end.value.code


def check_commands(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(text):
        shown = " ".join(words)
        for word in words:
            if re.fullmatch(r"(recipes|launch|benchmarks)/\w+\.\w+", word):
                assert (ROOT / word).exists(), shown
        subject, rest = called(words)
        if subject is None:
            continue
        rest = list(takewhile(lambda word: word not in ("<", ">"), rest))
        if subject.startswith("benchmarks/"):
            check_names(subject, rest, shown)
        elif rest and not any(word.endswith(".yaml") and "/" not in word for word in rest):
            assert not exit_code(subject, rest), f"{capsys.readouterr().err} in: {shown}"
        elif not subject.startswith("recipes/"):
            assert subject in VERBS, shown


def check_names(script: str, words: list[str], shown: str) -> None:
    """Checks the options of a benchmark in its source, and its settings as those of `eval`."""
    known = re.findall(r'"(--[a-z-]+)"', (ROOT / script).read_text(encoding="utf-8"))
    for word in words:
        name = word.partition("=")[0]
        if re.match(r"--[a-z]", word):
            assert name in known, f"{name} in: {shown}"
        elif script in BENCHMARKS and re.match(r"[a-z][a-z_]*(\.[\w-]+)*=", word):
            assert is_setting(BENCHMARKS[script], name), f"{name} in: {shown}"


def commands(text: str) -> Iterator[list[str]]:
    """Yields the words of every command in shell blocks, indented lines and inline code.

    Replaces variables that the page sets; cuts a command at an ellipsis.
    """
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    outside = without_blocks(text)
    blocks += re.findall(r"(?:^ {4,}.*\n?)+", outside, re.MULTILINE)
    blocks += re.findall(r"`((?:drafttrain|python|accelerate) [^`]*)`", outside)
    variables: dict[str, str] = {}
    for block in blocks:
        for line in logical_lines(block):
            for name, value in variables.items():
                line = re.sub(rf"\${name}\b", value, line)
            words = shlex.split(line.removeprefix("export "), comments=True)
            while words and (set_ := re.fullmatch(r"([A-Z_0-9]+)=(.*)", words[0], re.DOTALL)):
                variables[set_[1]] = set_[2]
                words = words[1:]
            if words and "..." in words:
                words = words[: words.index("...")]
            if words:
                yield words


def logical_lines(block: str) -> Iterator[str]:
    """Yields lines, joining those that end with a backslash or inside quotes."""
    line = ""
    for part in block.replace("\\\n", " ").splitlines():
        line = f"{line} {part.strip()}" if line else part.strip()
        try:
            shlex.split(line, comments=True)
        except ValueError:
            continue
        yield line
        line = ""


def called(words: list[str]) -> tuple[str | None, list[str]]:
    """Returns the drafttrain verb or script that a command runs, and the words after it."""
    if words[:2] == ["drafttrain", "train"] and len(words) > 2:
        file = find_recipe(words[2])
        if file.suffix == ".yaml":
            return f"recipes/{script_of(file).name}", ["--config", str(file), *words[3:]]
        return f"recipes/{file.name}", words[3:]
    if words[0] == "drafttrain" and len(words) > 1:
        return words[1], words[2:]
    if "drafttrain.cli" in words:
        place = words.index("drafttrain.cli") + 1
        return words[place], words[place + 1 :]
    for place, word in enumerate(words):
        if word == "-m" and words[place + 1].startswith("benchmarks."):
            return words[place + 1].replace(".", "/") + ".py", words[place + 2 :]
        if re.fullmatch(r"(recipes|benchmarks)/\w+\.py", word) and words[0] != "sbatch":
            assert (ROOT / word).exists(), " ".join(words)
            return word, words[place + 1 :]
    return None, []
