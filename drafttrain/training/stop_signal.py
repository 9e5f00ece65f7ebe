"""SIGTERM and SIGINT while training: finish the step and write a checkpoint before leaving.

A launcher passes on a signal that its processes may have received themselves (Ctrl-C reaches the
whole terminal, Slurm every process of a job), so a repetition at once means nothing.
"""

from __future__ import annotations

import signal
import time

import torch
from accelerate import Accelerator

IMPATIENT = 2.0
"""Seconds after which another Ctrl-C means: at once, without a checkpoint."""


class StopSignal:
    """Remembers that a signal came; as a context, from its beginning to its end."""

    def __init__(self) -> None:
        self.received: float | None = None
        """When the first one came, by `time.monotonic`."""
        self.flag: tuple[torch.Tensor, torch.cuda.Event | None] = torch.zeros(()), None
        """How many processes were asked to stop by the last step, once the event has come."""

    def __enter__(self) -> StopSignal:
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received = now
        elif number == signal.SIGINT and now - self.received > IMPATIENT:
            raise KeyboardInterrupt

    def seen(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked to stop. Of several processes, by their flags of the step
        before: all have the same answer, and no device is left without work while one waits."""
        here = self.received is not None
        if accelerator.num_processes == 1:
            return here
        flag = torch.full((), float(here), device=accelerator.device)
        flag = accelerator.reduce(flag, reduction="sum").to("cpu", non_blocking=True)
        on_gpu = accelerator.device.type == "cuda"
        copied = torch.cuda.current_stream().record_event() if on_gpu else None
        (before, ready), self.flag = self.flag, (flag, copied)
        if ready is not None:
            ready.synchronize()
        return bool(before > 0)
