"""Fixtures shared by all tests: one thread, and tiny random models (see tiny_models.py)."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch
from transformers import PreTrainedModel, dynamic_module_utils

from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Also for programs that tests start: tests run on all cores, one process per core."""
THREADS = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(THREADS)


TESTS = Path(__file__).parent
END_TO_END = ("benchmarks/", "commands/", "data/distill/", "export/", "faults/", "recipes/")
END_TO_END += ("test_docs.py", "test_extending.py", "test_launch.py", "test_page_commands.py")
"""Folders and files with tests of commands, recipes, launches, documentation and of what reads and
writes folders."""
COMPILED = "test_compiling.py"
"""Name of the files that wait for torch.compile, which takes seconds a graph; same tier."""


def is_end_to_end(path: Path) -> bool:
    """Whether a test file or folder belongs to `make test-all` alone."""
    name = path.relative_to(TESTS).as_posix() + "/" * path.is_dir()
    return name.startswith(END_TO_END) or path.name == COMPILED


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not even import what `make test` leaves to `make test-all`."""
    left = config.option.markexpr == "not end_to_end" and TESTS in collection_path.parents
    return True if left and is_end_to_end(collection_path) else None


def further_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases of tests marked `covered` that show no value of a parameter for the first
    time. The order is mixed, so that values meet in many combinations."""
    seen: set[tuple[str, str, str]] = set()
    further = set()
    for item in sorted(items, key=lambda item: crc32(item.nodeid.encode())):
        if item.get_closest_marker("covered") is not None:
            test = item.nodeid.split("[")[0]
            values = {(test, name, repr(value)) for name, value in item.callspec.params.items()}
            if values <= seen:
                further.add(item)
            seen |= values
    return further


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `make test-all` alone. Skips tests marked gpu without a CUDA device."""
    further = further_cases(items)
    for item in items:
        if item in further or is_end_to_end(item.path):
            item.add_marker("end_to_end")
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restores the number of threads after a test; a recipe run in this process changes it."""
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture
def tiny_marian() -> PreTrainedModel:
    """A random Marian model: float64, 40 tokens, pad = decoder start = 0, EOS 1."""
    return tiny_model("marian")


@pytest.fixture
def tiny_target(tiny_marian: PreTrainedModel, tmp_path: Path) -> Path:
    """A folder with the tiny Marian and a tokenizer for the words w4 ... w39."""
    return save_target(tiny_marian, tmp_path / "target")


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the test's own for the code that Transformers copies from custom_generate."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test module's `project` fixture, as working directory."""
    monkeypatch.chdir(project)
    return project


@pytest.fixture(scope="session")
def _refusal_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.refusals import make_project  # imports all commands and recipes

    root = tmp_path_factory.mktemp("refusals")
    with contextlib.chdir(root), contextlib.redirect_stderr(io.StringIO()):
        return make_project(root)


@pytest.fixture
def refusal_project(_refusal_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project folder of tests/refusals.py, as working directory."""
    monkeypatch.chdir(_refusal_root)
    return _refusal_root
