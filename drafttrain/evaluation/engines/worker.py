"""A program that decodes by CTranslate2, and by nothing else, as another process asks it.

python -m drafttrain.evaluation.engines.worker TASK.json

It reads a `Task` from the file, then a `Wish` a line from standard input, and answers each by a
`Done` in a line on standard output; the first line, before any wish, says that it is ready.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from drafttrain.decoding.ctranslate2.translate import (
    Placement,
    Translation,
    load_translator,
    translate,
)
from drafttrain.evaluation.batches.memory import peak_growth

CPU = torch.device("cpu")
READY = "ready"


@dataclass(frozen=True)
class Task:
    """What the program holds ready."""

    folder: str
    """Of the converted model."""
    placement: Placement
    how: Translation
    sources: list[list[int]]
    """Token ids of every prompt."""

    @classmethod
    def read(cls, file: Path) -> Task:
        values = json.loads(file.read_text(encoding="utf-8"))
        placement, how = Placement(**values.pop("placement")), Translation(**values.pop("how"))
        return cls(**values, placement=placement, how=how)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Wish:
    """Prompts to decode, by number, in batches as they come."""

    prompts: list[int]
    batch_size: int
    memory: bool = False
    """Whether to look at the memory that this takes, which slows it down."""


@dataclass(frozen=True)
class Done:
    """What became of a wish."""

    tokens: list[list[int]]
    """Of each prompt, EOS included."""
    seconds: list[float]
    """Of each prompt: the wall clock of its batch."""
    peak_bytes: int | None = None
    """Memory beyond what was held before, if that was asked for. None on a GPU, which torch does
    not count."""


def fulfil(translator: Any, task: Task, wish: Wish) -> Done:
    """Decode the prompts of a wish."""
    if wish.memory:
        done: list[Done] = []
        quick = replace(wish, memory=False)
        peak = peak_growth(lambda: done.append(fulfil(translator, task, quick)), CPU)
        return replace(done[0], peak_bytes=peak if task.placement.device == "cpu" else None)
    tokens: list[list[int]] = []
    seconds: list[float] = []
    for start in range(0, len(wish.prompts), wish.batch_size):
        chosen = wish.prompts[start : start + wish.batch_size]
        sources = [task.sources[prompt] for prompt in chosen]
        started = perf_counter()
        tokens += translate(translator, sources, task.how)
        seconds += [perf_counter() - started] * len(chosen)
    return Done(tokens, seconds)


def main(arguments: Sequence[str]) -> None:
    task = Task.read(Path(arguments[0]))
    translator = load_translator(Path(task.folder), task.placement)
    print(READY, flush=True)
    for line in sys.stdin:
        done = fulfil(translator, task, Wish(**json.loads(line)))
        print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
