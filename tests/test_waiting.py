"""Programs that compute with torch let waiting OpenMP threads sleep instead of spin."""

import ast
import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    file
    for folder in ("recipes", "benchmarks", "docs", "data", "drafttrain")
    for file in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in file.read_text(encoding="utf-8")
]
WITHOUT_TORCH = {"make_docstrings", "numpy", "soundfile", "tqdm", "typer"}


def packages(file: Path) -> list[str]:
    """Returns the packages that a file imports, in their order."""
    statements = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    imports = [one for one in statements if isinstance(one, ast.Import | ast.ImportFrom)]
    names: list[str] = []
    for one in sorted(imports, key=lambda one: one.lineno):
        names += [one.module] if isinstance(one, ast.ImportFrom) else [n.name for n in one.names]
    return [name.partition(".")[0] for name in names]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.name)
def test_every_program_imports_drafttrain_before_any_package_with_torch(file):
    before = set(takewhile(lambda name: name != "drafttrain", packages(file)))
    assert before <= sys.stdlib_module_names | WITHOUT_TORCH


@pytest.mark.parametrize("given", [None, "active"])
def test_drafttrain_sets_passive_waiting_and_keeps_a_setting_of_the_user(given):
    code = (
        "import drafttrain, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"OMP_WAIT_POLICY": given} if given else {})
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == f"{given or 'passive'} False\n"
