"""Programs that compute with torch let waiting OpenMP threads sleep instead of spin."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    file
    for folder in ("recipes", "benchmarks", "docs", "data", "drafttrain")
    for file in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in file.read_text(encoding="utf-8")
]
PROBE = """
import os, runpy, sys

class Found(BaseException):
    pass

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Found(os.environ.get("OMP_WAIT_POLICY"))

sys.meta_path.insert(0, Watch())
for file in sys.argv[1:]:
    before, sys.path[0] = set(sys.modules), os.path.dirname(file)
    os.environ.pop("OMP_WAIT_POLICY", None)
    try:
        runpy.run_path(file, run_name="imported")
        print(file, "without torch")
    except Found as found:
        print(file, found)
    for name in set(sys.modules) - before:
        if name.startswith(("drafttrain", "recipes", "benchmarks")):
            del sys.modules[name]
"""
"""Program that imports files until torch is imported, and prints the variable's value then."""


def test_every_program_has_set_passive_waiting_when_it_first_looks_for_torch():
    lines = ran(PROBE, *map(str, PROGRAMS)).splitlines()
    assert len(lines) == len(PROGRAMS)
    wrong = [line for line in lines if not line.endswith((" passive", " without torch"))]
    assert not wrong
    assert sum(line.endswith(" passive") for line in lines) >= 14


def test_settings_of_the_user_are_kept():
    code = "import drafttrain, os; print(os.environ['OMP_WAIT_POLICY'])"
    assert ran(code, OMP_WAIT_POLICY="active") == "active\n"


def ran(code: str, *arguments: str, **environment: str) -> str:
    """Runs code in a new interpreter and returns its output."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
