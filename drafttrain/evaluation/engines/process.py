"""The other side of `worker`: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import drafttrain
from drafttrain.decoding.types import Output
from drafttrain.evaluation.engines.worker import READY, Done, Task, Wish

WORKER = "drafttrain.evaluation.engines.worker"


class EngineProcess:
    """A process that decodes the prompts of a task, for a `with` statement.

    Nothing else computes while it does: thread pools of two libraries in one process spin against
    each other. Raises ValueError with the last words of a process that ended.
    """

    def __init__(self, task: Task, folder: Path) -> None:
        """folder: where the task and what the process complains of are written."""
        self._said = folder / "stderr.txt"
        file = folder / "task.json"
        task.write(file)
        place = str(Path(drafttrain.__file__).parents[1])
        paths = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
        with self._said.open("w", encoding="utf-8") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=os.environ | {"PYTHONPATH": paths},
            )

    def __enter__(self) -> Self:
        try:
            while self._line() != READY:
                pass
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def decode(self, prompts: Sequence[int], batch_size: int) -> list[Output]:
        """An output for each of these prompts, by number; its seconds are those of its batch."""
        done = self._ask(Wish(list(prompts), batch_size))
        return [
            Output(tokens=tokens, seconds=seconds)
            for tokens, seconds in zip(done.tokens, done.seconds, strict=True)
        ]

    def memory(self, prompts: Sequence[int], batch_size: int) -> int | None:
        """Peak bytes that decoding these takes; None where they are not known."""
        return self._ask(Wish(list(prompts), batch_size, memory=True)).peak_bytes

    def _ask(self, wish: Wish) -> Done:
        assert self._process.stdin is not None
        try:
            print(json.dumps(asdict(wish)), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failed() from None
        return Done(**json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        return line.strip()

    def _failed(self) -> ValueError:
        code = self._process.wait()
        words = self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = words[-1] if words else f"exit code {code}"
        return ValueError(
            f"ctranslate2 did not decode in a process of its own ({why}); leave it out of baselines"
        )

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
