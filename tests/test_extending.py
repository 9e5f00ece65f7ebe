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
    print(json.dumps([code, printed.getvalue()]), flush=True)
"""
"""Program that runs commands in sequence in one process, so that imports happen once."""


@dataclass(frozen=True)
class Block:
    """A code block of the page."""

    file: str
    place: str
    """The table or class to whose end it is added; `the end` of the file; empty: a new file."""
    code: str


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A folder with the package and recipes as changed by the page, models and data."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("drafttrain", "recipes"):
        shutil.copytree(ROOT / name, folder / name)  # with compiled files, which saves seconds
    (folder / "data").symlink_to(ROOT / "data")
    (folder / "checkpoints").mkdir()
    for model in ("functions-target", "functions-drafter"):
        (folder / "checkpoints" / model).symlink_to(ROOT / "checkpoints" / model)
    for block in blocks():
        add(block, folder)
    return folder


def test_the_extensions_decode_exactly_and_act_as_the_page_says(extended):
    """Runs plain decoding and the page's commands with the new verifier, stop, recipe, drafter."""
    words = [shlex.split(command) for command in (PLAIN, *commands())]
    words = [own[2:] if own[0] == "accelerate" else [*own, "--json"] for own in words]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(words)],
        cwd=extended,
        env={**os.environ, "PYTHONPATH": str(extended), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    codes, printed = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert codes == (0,) * 5, done.stderr
    assert "saved" in printed[3]
    plain, verifier, stop, drafter = (json.loads(printed[place]) for place in (0, 1, 2, 4))
    assert plain["tokens"] == verifier["tokens"] == stop["tokens"] == drafter["tokens"]
    assert max(one["accepted"] for one in verifier["rounds"]) == 1  # its setting
    drafted = [len(one["drafted"]) for one in stop["rounds"]]
    assert len(set(drafted)) > 1 and max(drafted) <= 20  # some drafts end early
    assert sum(one["accepted"] for one in drafter["rounds"]) > 0


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
