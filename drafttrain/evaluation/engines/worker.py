"""A program that decodes by CTranslate2, and by nothing else, as another process asks it.

python -m drafttrain.evaluation.engines.worker TASK.json

It reads a `Task` from the file, then a `Wish` a line from standard input, and answers each by a
`Done` in a line on standard output; the first line, before any wish, says that it is ready.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from safetensors.numpy import load_file

from drafttrain.decoding.ctranslate2.transcribe import (
    Transcription,
    load_transcriber,
    transcribe,
)
from drafttrain.decoding.ctranslate2.translate import (
    Placement,
    Translation,
    load_translator,
    translate,
)
from drafttrain.evaluation.batches.memory import peak_growth

CPU = torch.device("cpu")
READY = "ready"
NAME = "features"
"""Of the tensor in a file of features."""


@dataclass(frozen=True)
class Task:
    """What the program holds ready."""

    folder: str
    """Of the converted model."""
    placement: Placement
    how: Translation | Transcription
    sources: list[list[int]]
    """Token ids of every prompt; of a clip, what its output starts from."""
    features: str | None = None
    """Safetensors file of the clips' features [N, M, F]; None: prompts are texts."""

    @classmethod
    def read(cls, file: Path) -> Task:
        values = json.loads(file.read_text(encoding="utf-8"))
        kind = Translation if values["features"] is None else Transcription
        placement, how = Placement(**values.pop("placement")), kind(**values.pop("how"))
        return cls(**values, placement=placement, how=how)

    def open(self) -> Callable[[Sequence[int]], list[list[int]]]:
        """What decodes prompts, by number, as one batch. Loads the converted model."""
        folder, how = Path(self.folder), self.how
        if isinstance(how, Translation):
            translator = load_translator(folder, self.placement)
            return lambda chosen: translate(translator, [self.sources[n] for n in chosen], how)
        assert self.features is not None
        whisper, features = load_transcriber(folder, self.placement), load_file(self.features)[NAME]
        return lambda chosen: transcribe(
            whisper, features[list(chosen)], [self.sources[n] for n in chosen], how
        )

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


def fulfil(decode: Callable[[Sequence[int]], list[list[int]]], task: Task, wish: Wish) -> Done:
    """Decode the prompts of a wish."""
    if wish.memory:
        done: list[Done] = []
        quick = replace(wish, memory=False)
        peak = peak_growth(lambda: done.append(fulfil(decode, task, quick)), CPU)
        return replace(done[0], peak_bytes=peak if task.placement.device == "cpu" else None)
    tokens: list[list[int]] = []
    seconds: list[float] = []
    for start in range(0, len(wish.prompts), wish.batch_size):
        chosen = wish.prompts[start : start + wish.batch_size]
        started = perf_counter()
        tokens += decode(chosen)
        seconds += [perf_counter() - started] * len(chosen)
    return Done(tokens, seconds)


def main(arguments: Sequence[str]) -> None:
    task = Task.read(Path(arguments[0]))
    decode = task.open()
    print(READY, flush=True)
    for line in sys.stdin:
        done = fulfil(decode, task, Wish(**json.loads(line)))
        print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
