"""Random choices that are noted, so that two runs of one sequence can be compared draw by draw.

With one seed both get the same variates for as long as they choose the same. Where other row shapes
round otherwise, a choice differs only if its variate lies between the boundaries that the two runs
compute, and so within rounding of either. `WatchedRandomness` says how near it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.sampling import SampledRandomness


@dataclass(frozen=True)
class Choice:
    """What came of one call of a `Randomness`."""

    kind: str
    """The name of the method."""
    found: tuple[int, ...]
    """Indices that were drawn, row by row; of a run, which of its events came true."""


class WatchedRandomness(SampledRandomness):
    """Draws what `SampledRandomness` draws, and notes every choice.

    others: the choices of another run, to be compared with. At the first that differs, `distance`
    becomes that of the variate from where the other choice is made, by this run's numbers:

    - categorical: in probability, to the nearer end of the other index's part of the row;
    - accept_run: from the acceptance probability that the variate is compared with;
    - without_replacement: of the two perturbed log-probabilities from each other.

    It stays None where the runs part between draws (a drafter's own tie gave another draft, say, or
    noise was drawn by itself, `gumbel`): their next draws answer different questions.
    """

    def __init__(self, generator: torch.Generator, others: Sequence[Choice] = ()) -> None:
        super().__init__(generator)
        self.choices: list[Choice] = []
        self.distance: float | None = None
        self._others = iter(others)
        self._variates = torch.empty(0)

    def categorical(self, probs: Tensor) -> Tensor:
        found = super().categorical(probs)
        self._note("categorical", found, lambda *where: self._to_part(probs, *where))
        return found

    def accept_run(self, probs: Tensor) -> int:
        run = super().accept_run(probs)
        came_true = torch.arange(len(probs)) < run
        distances = (self._variates - probs).abs()
        self._note("accept_run", came_true.long(), lambda place, *_: distances[place])
        return run

    def without_replacement(self, probs: Tensor, count: int) -> Tensor:
        found = super().without_replacement(probs, count)
        keys = probs.log() + self._variates

        def apart(place: int, mine: int, other: int) -> Tensor:
            row = keys[place // count]
            return (row[mine] - row[other]).abs()

        self._note("without_replacement", found, apart)
        return found

    def uniform(self, like: Tensor) -> Tensor:
        self._variates = super().uniform(like)
        return self._variates

    def gumbel(self, like: Tensor) -> Tensor:
        self._variates = super().gumbel(like)
        return self._variates

    def _to_part(self, probs: Tensor, row: int, mine: int, other: int) -> Tensor:
        """From a row's variate to the nearer end of another index's part of [0, 1)."""
        upto = probs[row].cumsum(dim=-1, dtype=torch.float64)
        end = upto[other - 1] if other > mine else upto[other]
        return (end / upto[-1] - self._variates[row, 0]).abs()

    def _note(self, kind: str, found: Tensor, distance: Callable[[int, int, int], Tensor]) -> None:
        """distance: from (place in `found`, this run's index there, the other's)."""
        choice = Choice(kind, tuple(found.flatten().tolist()))
        self.choices.append(choice)
        other = next(self._others, choice)
        if other == choice:
            return
        self._others = iter(())
        if (other.kind, len(other.found)) == (kind, len(choice.found)):
            pairs = enumerate(zip(choice.found, other.found, strict=True))
            place, (mine, theirs) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            self.distance = float(distance(place, mine, theirs))
