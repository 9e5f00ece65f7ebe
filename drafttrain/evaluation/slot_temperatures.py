"""How sure the slots of a block drafter ought to be: a temperature for each, by known outputs.

A tree's nodes are scored by how likely the target is believed to go there, so a slot whose rows are
less sure than it is right gets too many siblings, and one that is surer too few. The temperature
that makes the output's own tokens likeliest mends that (temperature scaling, Guo et al. 2017).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from drafttrain.decoding.sampling import exact_enough
from drafttrain.models.spec_drafter.model import UNDRAFTED

COOLEST, HOTTEST = 0.1, 4.0
"""Between these it is sought: a slot that is always right would have none."""
STEPS = 24
TEMPERATURES = [COOLEST * (HOTTEST / COOLEST) ** (step / STEPS) for step in range(STEPS + 1)]
"""Those that rows are looked at under; the best lies on a parabola through three of them."""
ROWS_ENOUGH = 400
"""Rows of a slot that it is fitted to."""


def fit_slot_temperatures(blocks: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """The temperature of each slot's rows under which the tokens of outputs are likeliest.

    Outputs are read until every slot has rows enough, or none is left; a slot that is reached by
    none has the temperature of the one before it. Tokens that cannot be drafted count nothing.
    blocks: of each output the rows behind its own tokens at every prefix [L, K, V], before
    temperature, and its tokens [L].
    """
    slots: list[Surprise] = []
    for logits, output in blocks:
        slots += [Surprise() for _ in range(len(slots), logits.shape[1])]
        for slot, surprise in enumerate(slots):
            reached = max(len(output) - slot, 0)
            surprise.add(logits[:reached, slot], output[slot:].to(logits.device))
        if all(surprise.rows >= ROWS_ENOUGH for surprise in slots):
            break
    found: list[float] = []
    for surprise in slots:
        found.append(surprise.least() if surprise.rows else (found or [1.0])[-1])
    return found


class Surprise:
    """How unlikely one slot's rows find the tokens of outputs, under each of `TEMPERATURES`."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums = torch.zeros(len(TEMPERATURES), dtype=torch.double)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Take note of rows [N, V] and of the output's tokens where they predict [N]."""
        drafted = rows.gather(1, tokens[:, None])[:, 0] > UNDRAFTED / 2
        missing = ROWS_ENOUGH - self.rows
        rows, tokens = exact_enough(rows[drafted][:missing]), tokens[drafted][:missing, None]
        for place, temperature in enumerate(TEMPERATURES):
            self._sums[place] -= float((rows / temperature).log_softmax(-1).gather(1, tokens).sum())
        self.rows += len(rows)

    def least(self) -> float:
        """The temperature under which it is least, to two places."""
        best = int(self._sums.argmin())
        if best in (0, STEPS):
            return round(TEMPERATURES[best], 2)
        below, at, above = self._sums[best - 1 : best + 2].tolist()
        shift = 0.5 * (below - above) / (below - 2 * at + above)
        return round(TEMPERATURES[best] * (HOTTEST / COOLEST) ** (shift / STEPS), 2)
