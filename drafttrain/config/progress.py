"""Progress of long work: a bar on a terminal, elsewhere a plain line every half minute, as in

train quickstart: 150/250 [00:54<00:36, 2.75step/s, loss 1.876]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from tqdm import tqdm


def tracking(
    work: int | Sequence[Any],
    description: str,
    unit: str,
    done: int = 0,
    shown: bool = True,
    out: TextIO | None = None,
) -> tqdm:
    """Progress of a number of units (steps, rows), of which `done` were there before, or through
    items.

    shown: false in all processes but the one that prints. out: default is standard error. Text set
    with `set_postfix_str(text, refresh=False)` stands after the count.
    """
    out = sys.stderr if out is None else out
    style = {"file": out, "dynamic_ncols": True}
    if not out.isatty():
        style = {"file": Lines(out), "mininterval": 30.0, "miniters": 1, "ncols": 0}
    style |= {"total": work} if isinstance(work, int) else {"iterable": work}
    return tqdm(initial=done, desc=description, unit=unit, disable=not shown, **style)


class Lines:
    """A file that gets each state of a bar as a line of its own."""

    def __init__(self, out: TextIO) -> None:
        self._out, self.flush = out, out.flush

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=self._out)
