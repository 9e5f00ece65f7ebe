"""Handling of SIGTERM and SIGINT in training: finish the step and write a checkpoint, then exit.

A launcher forwards signals that its processes may also receive directly (Ctrl-C reaches the whole
terminal, Slurm signals every process of a job), so an immediate repetition is ignored.
"""

from __future__ import annotations

import signal
import time

import torch
from accelerate import Accelerator

IMPATIENT = 2.0
"""Seconds after the first signal; a later Ctrl-C exits immediately, without a checkpoint."""


class StopSignal:
    """Context manager that handles both signals inside its block and records the first one."""

    def __init__(self) -> None:
        self.received: float | None = None
        """Time of the first signal, by `time.monotonic`."""
        self.flag: tuple[torch.Tensor, torch.cuda.Event | None] = torch.zeros(()), None
        """Processes with a signal at the previous call of `seen`; valid after the event."""

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
        """Whether any process received a signal. With several processes this uses the flags of the
        previous call, so all get the same answer without waiting for the current step's work."""
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
