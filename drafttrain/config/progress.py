"""How far long work is: a bar on a terminal, elsewhere a plain line every half minute.

A bar that is redrawn at every step makes a log file unreadable; a line such as

    train quickstart: 150/250 steps, 60 %, 2.75 steps/s, 0:36 left, loss 1.876

every 30 seconds, and one at the end, does not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO, TypeVar

from tqdm import tqdm

INTERVAL = 30.0
"""Seconds between two lines."""
Item = TypeVar("Item")


class Progress(Protocol):
    """What work reports to."""

    def update(self, done: int = 1) -> None:
        """So many more units are done."""

    def show(self, text: str) -> None:
        """What stands behind the count from now on, such as a loss."""


@contextmanager
def tracking(
    total: int,
    description: str,
    unit: str,
    done: int = 0,
    shown: bool = True,
    out: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Progress of `total` units (steps, rows), of which `done` were there before.

    unit: in the singular. shown: false in all processes but the one that prints. out: default is
    standard error. clock: seconds, for lines.
    """
    out = sys.stderr if out is None else out
    if shown and out.isatty():
        with tqdm(
            total=total, initial=done, desc=description, unit=unit, dynamic_ncols=True, file=out
        ) as bar:
            yield Bar(bar)
        return
    lines = Lines(total, description, unit, done, out if shown else None, clock)
    try:
        yield lines
    finally:
        lines.end()


def tracked(
    items: Sequence[Item], description: str, unit: str, shown: bool = True
) -> Iterator[Item]:
    """The items one by one, each reported when it has been dealt with."""
    with tracking(len(items), description, unit, shown=shown) as work:
        for item in items:
            yield item
            work.update()


class Bar:
    """Progress as a bar that is redrawn in place."""

    def __init__(self, bar: tqdm):
        self._bar = bar

    def update(self, done: int = 1) -> None:
        self._bar.update(done)

    def show(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)


class Lines:
    """Progress as lines of text; without `out` nothing is written."""

    def __init__(
        self,
        total: int,
        description: str,
        unit: str,
        done: int,
        out: TextIO | None,
        clock: Callable[[], float],
    ):
        self._total, self._description, self._unit = total, description, unit
        self._before = self._done = done
        self._out, self._clock = out, clock
        self._start = self._last = clock()
        self._text = ""

    def update(self, done: int = 1) -> None:
        self._done += done
        if self._clock() - self._last >= INTERVAL:
            self._write()

    def show(self, text: str) -> None:
        self._text = text

    def end(self) -> None:
        """The last line: how far it came, and how long it took. None where nothing was done."""
        if self._done > self._before:
            self._write(ended=True)

    def _write(self, ended: bool = False) -> None:
        self._last = self._clock()
        seconds, done = self._last - self._start, self._done - self._before
        parts = [f"{self._done:,}/{self._total:,} {self._unit}s"]
        parts.append(f"{100 * self._done // max(self._total, 1)} %")
        if seconds > 0:
            rate = done / seconds
            parts.append(f"{rate:,.{2 if rate < 100 else 0}f} {self._unit}s/s")
        if ended:
            parts.append(f"{minutes(seconds)} in all")
        elif done > 0:
            parts.append(f"{minutes(seconds * (self._total - self._done) / done)} left")
        if self._text:
            parts.append(self._text)
        if self._out is not None:
            print(f"{self._description}: {', '.join(parts)}", file=self._out, flush=True)


def minutes(seconds: float) -> str:
    """36.4 -> 0:36, 3725 -> 1:02:05."""
    rest, second = divmod(round(seconds), 60)
    hour, minute = divmod(rest, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
