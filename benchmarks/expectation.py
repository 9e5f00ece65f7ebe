"""Expected and actual acceptance of draft trees (OPT-Tree, Wang et al. 2025, Figure 4).

Compares each round's E(A), the accepted tokens that the drafter expects, with the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.decoding.types import Output
from drafttrain.evaluation.bootstrap import Array, Estimate, Ratio, estimate, score

import numpy as np


@dataclass(frozen=True)
class Bin:
    """Rounds of similar E(A)."""

    rounds: int
    expected: float
    """Mean E(A)."""
    accepted: Estimate
    """Mean accepted tokens."""


@dataclass(frozen=True)
class Expectation:
    """E(A) and accepted tokens over all rounds with both."""

    rounds: int
    expected: float
    accepted: Estimate
    correlation: Estimate | None
    """Pearson correlation over rounds; None if either does not vary."""
    bins: list[Bin]
    """Bins of about equally many rounds, by rising E(A)."""


def compare_expectation(outputs: Sequence[Output], resamples: Array, bins: int = 10) -> Expectation:
    """Compares E(A) with the length of the accepted path, with intervals over prompts.

    Accepted tokens past the maximal length count too: the drafter was right about them. Raises
    ValueError if no round has an expectation.
    """
    rounds = [
        (prompt, played.expected, len(played.path))
        for prompt, output in enumerate(outputs)
        for played in output.rounds
        if played.expected is not None
    ]
    if not rounds:
        raise ValueError("no round has an expected acceptance; decode with an opt-tree")
    prompts, expected, accepted = (np.array(column) for column in zip(*rounds, strict=True))
    edges = np.unique(np.quantile(expected, np.linspace(0.0, 1.0, bins + 1)[1:-1]))
    numbers = np.searchsorted(edges, expected, side="right")
    filled = []
    for number in np.unique(numbers):
        inside = numbers == number
        mean = _mean(prompts[inside], accepted[inside], resamples)
        filled.append(Bin(int(inside.sum()), float(expected[inside].mean()), mean))
    return Expectation(
        rounds=len(rounds),
        expected=float(expected.mean()),
        accepted=_mean(prompts, accepted, resamples),
        correlation=_correlation(prompts, expected, accepted, resamples),
        bins=filled,
    )


def _mean(prompts: Array, values: Array, resamples: Array) -> Estimate:
    """Mean over rounds; prompts: the prompt of each round."""
    size = resamples.shape[1]
    sums = np.bincount(prompts, weights=values, minlength=size)
    mean = estimate(Ratio(sums, np.bincount(prompts, minlength=size)), resamples)
    assert mean is not None, "there are rounds"
    return mean


def _correlation(prompts: Array, x: Array, y: Array, resamples: Array) -> Estimate | None:
    if np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return None
    x, y = x - x.mean(), y - y.mean()
    moments = np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=1)
    sums = np.zeros((resamples.shape[1], moments.shape[1]))
    np.add.at(sums, prompts, moments)
    return estimate(score(_pearson, sums), resamples)


def _pearson(sums: Array) -> float:
    """Correlation from n and the sums of x, y, x², y² and xy; NaN if it is undefined."""
    count, x, y, xx, yy, xy = sums
    spread = (count * xx - x * x) * (count * yy - y * y)
    return float((count * xy - x * y) / np.sqrt(spread)) if spread > 0.0 else float("nan")
