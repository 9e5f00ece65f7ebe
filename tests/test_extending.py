"""The walk-throughs of docs/extending.md, executed on a copy of the package."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PLAIN = (
    "drafttrain generate --target checkpoints/functions-target --drafter none --data "
    "data/functions/test.jsonl.gz --limit 1 decode.sampling.max_new_tokens=16"
)
DRIVER = """
import contextlib, io, json, runpy, sys

from drafttrain import cli

for words in json.loads(sys.argv[1]):
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed):
        try:
            if words[0] == "drafttrain":
                cli.main(words[1:])
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps({"words": words, "code": code, "printed": printed.getvalue()}), flush=True)
"""
"""Program that runs commands in sequence in one process, so that imports happen once."""


@dataclass(frozen=True)
class Block:
    """A code block of the page."""

    file: str
    place: str
    """The table or class to whose end it is added; `the end` of the file; empty: a new file."""
    code: str


@dataclass(frozen=True)
class Ran:
    words: list[str]
    code: int
    printed: str

    @property
    def decoded(self) -> dict[str, Any]:
        """The line printed by `generate --json`."""
        return json.loads(self.printed)


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A folder with the package and recipes as changed by the page, models and data."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("drafttrain", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "data").symlink_to(ROOT / "data")
    (folder / "checkpoints").mkdir()
    for model in ("functions-target", "functions-drafter"):
        (folder / "checkpoints" / model).symlink_to(ROOT / "checkpoints" / model)
    for block in blocks():
        add(block, folder)
    return folder


@pytest.fixture(scope="module")
def ran(extended) -> dict[str, Ran]:
    """Results of the page's commands and of plain decoding, by what they test."""
    names = ("verifier", "stop", "recipe", "drafter")
    tried = {"plain": PLAIN, **dict(zip(names, commands(), strict=True))}
    words = [shown_as_json(command) for command in tried.values()]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(words)],
        cwd=extended,
        env={**os.environ, "PYTHONPATH": str(extended), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    results = [Ran(**json.loads(line)) for line in done.stdout.splitlines()]
    assert [one.code for one in results] == [0] * len(tried), done.stderr
    return dict(zip(tried, results, strict=True))


@pytest.mark.parametrize("extension", ["verifier", "stop", "drafter"])
def test_greedy_output_is_that_of_plain_decoding(ran, extension):
    assert ran[extension].decoded["tokens"] == ran["plain"].decoded["tokens"]


def test_the_verifier_accepts_at_most_its_setting(ran):
    accepted = [one["accepted"] for one in ran["verifier"].decoded["rounds"]]
    assert max(accepted) == 1


def test_the_stop_policy_ends_some_drafts_early(ran):
    drafted = [len(one["drafted"]) for one in ran["stop"].decoded["rounds"]]
    assert len(set(drafted)) > 1 and max(drafted) <= 20


def test_the_recipe_trains_a_drafter_whose_drafts_are_accepted(ran):
    assert "saved" in ran["recipe"].printed
    assert sum(one["accepted"] for one in ran["drafter"].decoded["rounds"]) > 0


def blocks() -> list[Block]:
    found = []
    for code in re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL):
        first, rest = code.split("\n", 1)
        file, _, place = first.removeprefix("# ").partition(", ")
        found.append(Block(file, re.sub(r"^(in|at) ", "", place), rest))
    return found


def commands() -> list[str]:
    text = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]


def shown_as_json(command: str) -> list[str]:
    words = shlex.split(command)
    if words[:2] == ["accelerate", "launch"]:
        return words[2:]
    return [*words, "--json"]


def add(block: Block, folder: Path) -> None:
    """Adds a block to its file, as its first line says."""
    file = folder / block.file
    if not block.place:
        assert not file.exists(), f"{block.file} is there already"
        file.write_text(block.code, encoding="utf-8")
        return
    text = file.read_text(encoding="utf-8")
    if block.place == "the end":
        file.write_text(f"{text}\n\n{block.code}", encoding="utf-8")
        return
    lines = text.splitlines(keepends=True)
    [node] = [one for one in ast.parse(text).body if block.place in defined(one)]
    if isinstance(node, ast.ClassDef):
        lines.insert(node.end_lineno, "\n" + indent(block.code, "    "))
    else:
        rows = next(one for one in ast.walk(node.value) if isinstance(one, ast.Tuple))
        last = rows.elts[-1]
        line, column = last.end_lineno - 1, last.end_col_offset
        before, after = lines[line][:column], lines[line][column:].removeprefix(",")
        lines[line] = f"{before},\n{block.code.rstrip().rstrip(',')},{after}"
    file.write_text("".join(lines), encoding="utf-8")


def defined(node: ast.stmt) -> set[str]:
    """Returns the names that a statement of a module defines."""
    if isinstance(node, ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {one.id for one in targets if isinstance(one, ast.Name)}
