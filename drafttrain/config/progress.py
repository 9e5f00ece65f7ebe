"""Progress of long work: a bar on a terminal, else a plain line every 30 seconds, such as

train quickstart: 150/250 [00:54<00:36, 2.75step/s, loss 1.876]
"""

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
    """Returns a progress bar for a number of units (steps, rows), or over a sequence of items.

    done: units finished earlier. shown: true only in the process that prints; no work: no bar. out:
    default is standard error. `set_postfix_str(text, refresh=False)` sets text after the count.
    """
    out = sys.stderr if out is None else out
    style = {"file": out, "dynamic_ncols": True}
    if not out.isatty():
        style = {"file": Lines(out), "mininterval": 30.0, "miniters": 1, "ncols": 0}
    style |= {"total": work} if isinstance(work, int) else {"iterable": work}
    return tqdm(initial=done, desc=description, unit=unit, disable=not (shown and work), **style)


class Lines:
    """A file for tqdm that writes each state of a bar as a separate line."""

    def __init__(self, out: TextIO) -> None:
        self._out, self.flush = out, out.flush

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=self._out)
