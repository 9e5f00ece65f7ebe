"""Run the wrong inputs, and write the table of the lines that they print.

python -m tests.wrong_input_lines > docs/wrong-inputs.md
"""

from __future__ import annotations

import io
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub
import torch
from transformers import PreTrainedModel

from drafttrain.cli import main
from drafttrain.models.acceptance_head import AcceptanceHead
from recipes import (
    train_acceptance_head,
    train_block_heads,
    train_spec_drafter,
    train_target,
)
from tests.wrong_input_cases import WrongInput
from tests.wrong_input_project import make_project
from tests.wrong_inputs import GROUPS, WRONG_INPUTS

RECIPES: dict[str, Callable[[Sequence[str]], None]] = {
    "train_spec_drafter.py": train_spec_drafter.main,
    "train_acceptance_head.py": train_acceptance_head.main,
    "train_block_heads.py": train_block_heads.main,
    "train_target.py": train_target.main,
}


@dataclass(frozen=True)
class Refusal:
    """How a command ended."""

    code: int
    out: str
    error: str
    loaded: tuple[str, ...]
    """Classes of the models whose weights were read; heads are small and not counted."""


def refuse(case: WrongInput) -> Refusal:
    """Run a command line in this process. The working directory must be the project."""
    program, *arguments = shlex.split(case.line)
    out, error = io.StringIO(), io.StringIO()
    with (
        chdir(case.place),
        redirect_stdout(out),
        redirect_stderr(error),
        isolated(),
        recorded() as loaded,
    ):
        try:
            RECIPES.get(program, main)(arguments)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Refusal(code, out.getvalue(), error.getvalue(), tuple(loaded))


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Names of the classes of models that `from_pretrained` is called for."""
    names: list[str] = []
    original = PreTrainedModel.from_pretrained.__func__

    def record(kind: type[PreTrainedModel], *arguments, **settings):
        if not issubclass(kind, AcceptanceHead):
            names.append(kind.__name__)
        return original(kind, *arguments, **settings)

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(record)):
        yield names


@contextmanager
def isolated() -> Iterator[None]:
    """The Hub is not asked, standard input is empty, and there is no GPU."""
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 0),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        mock.patch("sys.stdin", io.StringIO()),
    ):
        yield


def contents(root: Path) -> dict[str, str]:
    """Every file and folder below a root, files with the hash of their bytes."""
    return {
        str(path.relative_to(root)): sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(root.rglob("*"))
    }


DOCUMENT = "docs/wrong-inputs.md"
HEADER = f"""# Wrong inputs, and the lines they print

Made by `python -m tests.wrong_input_lines > {DOCUMENT}`; `tests/test_wrong_input.py` runs every
line and compares. Each ends with exit code 2 and one line on standard error, the one shown here
behind the program's name. Nothing is written, and no weights of a target or drafter are read, but
for inputs marked †, which cannot be told from right ones without them. `--debug` shows the
traceback instead. The folder is the one that `tests/wrong_input_project.py` makes; recipes are
launched with `accelerate launch recipes/...`.
"""


def document(refusals: Mapping[WrongInput, Refusal], root: Path) -> str:
    """The table of all wrong inputs, in Markdown."""
    parts = [HEADER]
    for title, cases in GROUPS.items():
        parts += [f"## {title}\n", "| input | it prints |", "| --- | --- |"]
        for case in cases:
            line = refusals[case].error.strip().partition(": ")[2].replace(f"{root}/", "")
            place = "" if case.place == "." else " where there is no run"
            mark = " †" if case.weights else ""
            parts.append(f"| {_cell(case.line)}{place}{mark} | {_cell(line)} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def _cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f"`` {escaped} ``" if "`" in escaped else f"`{escaped}`"


def run_all(root: Path) -> dict[WrongInput, Refusal]:
    """Make the project in an empty folder and give every wrong input there."""
    with chdir(root):
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            make_project(root)
        return {case: refuse(case) for case in WRONG_INPUTS}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(document(run_all(Path(folder)), Path(folder)))
