"""Enumeration of all outcomes of production code and their probabilities.

The code under test runs once for each sequence of random choices. A run follows its script, then
makes the first possible choice each time and records the others as scripts to run later. Branches
of probability zero are not visited.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.types import Source

Outcome = TypeVar("Outcome", bound=Hashable)


class EnumeratedRandomness:
    """A `Randomness` that follows a script; `probability` is that of all choices made."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.probability = 1.0
        self.untried: list[list[int]] = []
        self._script = list(script)
        self._made: list[int] = []

    def categorical(self, probs: Tensor) -> Tensor:
        rows = probs.tolist()
        assert all(abs(sum(row) - 1.0) < 1e-9 for row in rows), "a row is no distribution"
        return torch.tensor([self._choose(row) for row in rows], device=probs.device)

    def accept_run(self, probs: Tensor) -> int:
        outcomes, reached = [], 1.0
        for probability in probs.tolist():
            assert 0.0 <= probability <= 1.0, "an acceptance probability is none"
            outcomes.append(reached * (1.0 - probability))
            reached *= probability
        return self._choose([*outcomes, reached])

    def without_replacement(self, probs: Tensor, count: int) -> Tensor:
        drawn = torch.full((len(probs), count), -1, device=probs.device)
        for row, left in enumerate(probs.clone()):
            for place in range(count):
                if not (left > 0).any():
                    break
                drawn[row, place] = self._choose((left / left.sum()).tolist())
                left[drawn[row, place]] = 0.0
        return drawn

    def gumbel(self, like: Tensor) -> Tensor:
        raise NotImplementedError("noise is not enumerated; its trees are, by their own law")

    def _choose(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0.0]
        if len(self._made) < len(self._script):
            choice = self._script[len(self._made)]
        else:
            choice = possible[0]
            self.untried += [[*self._made, other] for other in possible[1:]]
        self._made.append(choice)
        self.probability *= weights[choice]
        return choice


def enumerate_law(run: Callable[[EnumeratedRandomness], Outcome]) -> dict[Outcome, float]:
    """Returns the exact distribution of the result of `run`, over all its random choices."""
    law: dict[Outcome, float] = defaultdict(float)
    for outcome, probability in enumerate_outcomes(run):
        law[outcome] += probability
    assert abs(sum(law.values()) - 1.0) < 1e-12
    return dict(law)


def enumerate_outcomes(
    run: Callable[[EnumeratedRandomness], Outcome],
) -> Iterator[tuple[Outcome, float]]:
    """Yields every run's result and probability; results may repeat."""
    scripts: list[list[int]] = [[]]
    while scripts:
        randomness = EnumeratedRandomness(scripts.pop())
        outcome = run(randomness)
        yield outcome, randomness.probability
        scripts += randomness.untried


def enumerate_output(
    decoder: Decoder,
    sources: Sequence[Source],
    max_new_tokens: int,
    place: int = 0,
    batch_size: int | None = None,
) -> dict[tuple[int, ...], float]:
    """Returns the exact distribution of the output of sources[place], decoded in a batch.

    The other sources draw from their own random streams. batch_size: None decodes all together.
    Replaces decoder.randomness.
    """
    size = batch_size or len(sources)

    def run(randomness: EnumeratedRandomness) -> tuple[int, ...]:
        def own(row: int) -> Randomness:
            return randomness if row == place else sequence_randomness(0, row)

        outputs = replace(decoder, randomness=own).decode_all(sources, max_new_tokens, size)
        return tuple(outputs[place].tokens)

    return enumerate_law(run)


def total_variation(law: dict[Outcome, float], other: dict[Outcome, float]) -> float:
    """Returns the total variation distance of two distributions."""
    return 0.5 * sum(abs(law.get(x, 0.0) - other.get(x, 0.0)) for x in law.keys() | other.keys())
