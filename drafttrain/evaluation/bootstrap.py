"""Bootstrap intervals over prompts.

A resample draws as many prompts as there are, with replacement. It is kept as the number of times
each prompt was drawn, so a statistic of sums over prompts (a ratio, a BLEU score) needs one matrix
product for all resamples. One matrix serves every statistic of a report: differences between
methods are therefore paired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """A statistic that is a sum over prompts divided by a sum over prompts."""

    numerators: Array
    """[P], one for each prompt."""
    denominators: Array
    """[P]; a prompt that does not count has 0 in both."""


def draw_resamples(prompts: int, resamples: int, seed: int = 0) -> Array:
    """How often each prompt is drawn in each resample. Shapes: -> [B, P], rows sum to P."""
    if prompts < 1:
        raise ValueError("0 prompts: there is nothing to measure; give data with at least one row")
    generator = np.random.default_rng(seed)
    draws = generator.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=resamples)
    return draws.astype(np.float64)


def estimate_ratio(ratio: Ratio, resamples: Array) -> Estimate | None:
    """Ratio of sums with its percentile interval; None where the denominator is zero."""
    denominator = float(ratio.denominators.sum())
    if denominator == 0.0:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        values = (resamples @ ratio.numerators) / (resamples @ ratio.denominators)
    return with_interval(float(ratio.numerators.sum()) / denominator, values)


def estimate_quotient(above: Ratio, below: Ratio, resamples: Array) -> Estimate | None:
    """One ratio over another, both resampled with the same prompts; None where one is empty."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value, resampled = (
            (counts @ above.numerators)
            / (counts @ above.denominators)
            / ((counts @ below.numerators) / (counts @ below.denominators))
            for counts in (np.ones(len(above.numerators)), resamples)
        )
    return with_interval(float(value), resampled) if np.isfinite(value) else None


def estimate_difference(ours: Ratio, theirs: Ratio, resamples: Array) -> Estimate | None:
    """One ratio less another, both resampled with the same prompts; None where one is empty."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value, resampled = (
            (counts @ ours.numerators) / (counts @ ours.denominators)
            - (counts @ theirs.numerators) / (counts @ theirs.denominators)
            for counts in (np.ones(len(ours.numerators)), resamples)
        )
    return with_interval(float(value), resampled) if np.isfinite(value) else None


def estimate_mean(values: Array, resamples: Array) -> Estimate | None:
    """Mean over prompts. Shapes: values [P]."""
    return estimate_ratio(Ratio(values, np.ones(len(values))), resamples)


def estimate_median(values: Array, resamples: Array) -> Estimate:
    """Median over prompts, of an even number the mean of the middle two. Shapes: values [P]."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    reached = np.cumsum(resamples[:, order], axis=1)  # drawn up to each, from the least on
    middle = (int(reached[0, -1]) - 1) / 2.0
    low, high = (
        ranked[(reached <= place).sum(axis=1)] for place in (np.floor(middle), np.ceil(middle))
    )
    return with_interval(float(np.median(values)), (low + high) / 2.0)


def estimate_score(
    score: Callable[[Array], float], statistics: Array, resamples: Array
) -> Estimate:
    """A function of summed statistics (BLEU, chrF). Shapes: statistics [P, S]; score takes [S]."""
    values = np.array([score(summed) for summed in resamples @ statistics])
    return with_interval(score(statistics.sum(axis=0)), values)


def estimate_score_difference(
    score: Callable[[Array], float], ours: Array, theirs: Array, resamples: Array
) -> Estimate:
    """Paired difference of a score: both systems are resampled with the same prompts.

    Koehn (2004), "Statistical significance tests for machine translation evaluation".
    Shapes: ours [P, S], theirs [P, S]. Positive: ours is better.
    """
    differences = [
        score(a) - score(b) for a, b in zip(resamples @ ours, resamples @ theirs, strict=True)
    ]
    value = score(ours.sum(axis=0)) - score(theirs.sum(axis=0))
    return with_interval(value, np.array(differences))


def with_interval(value: float, resampled: Array) -> Estimate:
    """The value with the 2.5 % and 97.5 % points of its resampled values (finite ones)."""
    finite = resampled[np.isfinite(resampled)]
    if len(finite) == 0:
        return Estimate(value, value, value)
    low, high = np.quantile(finite, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
