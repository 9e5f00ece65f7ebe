"""Gives a wrong command line to a command or recipe in this process, and says how that ended."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
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
    train_causal_drafter,
    train_parallel_drafter,
    train_spec_drafter,
    train_target,
)

RECIPES: dict[str, Callable[[Sequence[str]], None]] = {
    "train_spec_drafter.py": train_spec_drafter.main,
    "train_acceptance_head.py": train_acceptance_head.main,
    "train_block_heads.py": train_block_heads.main,
    "train_causal_drafter.py": train_causal_drafter.main,
    "train_parallel_drafter.py": train_parallel_drafter.main,
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


def refuse(line: str) -> Refusal:
    """Run a command line in this process. The working directory must be the project."""
    program, *arguments = shlex.split(line)
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error), isolated(), recorded() as loaded:
        try:
            RECIPES.get(program, main)(arguments)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Refusal(code, out.getvalue(), error.getvalue(), tuple(loaded))


def check_refusal(project: Path, line: str, says: Sequence[str], weights: bool = False) -> None:
    """Exit code 2, one line that holds all of `says`, nothing written, and weights left unread.

    With `weights`, they must have been read: without them the input cannot be told from a right
    one.
    """
    before = contents(project)
    refusal = refuse(line)
    assert refusal.code == 2, refusal.error
    assert refusal.out == ""
    [printed] = refusal.error.splitlines()
    assert printed.startswith(f"{line.split()[0]}: ")
    for words in says:
        assert words in printed, printed
    assert bool(refusal.loaded) == weights, refusal.loaded
    assert contents(project) == before


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


def contents(root: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below a root, with its size and the time of its last change."""
    found = {path: path.stat() for path in root.rglob("*")}
    return {str(path): (facts.st_size, facts.st_mtime_ns) for path, facts in found.items()}
