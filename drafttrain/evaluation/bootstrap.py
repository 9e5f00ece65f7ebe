"""Bootstrap intervals over prompts.

A resample draws P of the P prompts with replacement and is stored as the count of each prompt, so a
statistic of sums over prompts (a ratio, a BLEU score) needs one matrix product for all resamples.
All statistics of a report use the same resamples, so differences between methods are paired.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Statistic = Callable[[Array], Array]
"""Maps the count of each prompt in each resample [B, P] to the B values of the statistic."""


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
    """[P], one value per prompt."""
    denominators: Array
    """[P]; a prompt to leave out has 0 in both arrays."""

    def __call__(self, counts: Array) -> Array:
        return (counts @ self.numerators) / (counts @ self.denominators)


def mean(values: Array) -> Statistic:
    """Returns the mean over prompts. Shapes: values [P]."""
    return Ratio(values, np.ones(len(values)))


def quotient(above: Statistic, below: Statistic) -> Statistic:
    """Returns the quotient of two statistics of the same prompts."""
    return lambda counts: above(counts) / below(counts)


def difference(ours: Statistic, theirs: Statistic) -> Statistic:
    """Returns the paired difference of two statistics (Koehn 2004 for translation scores)."""
    return lambda counts: ours(counts) - theirs(counts)


def median(values: Array) -> Statistic:
    """Returns the median over prompts; of an even number, the mean of the middle two."""
    order = np.argsort(values, kind="stable")

    def middle(counts: Array) -> Array:
        reached = np.cumsum(counts[:, order], axis=1)  # cumulative counts in order of value
        centre = (reached[0, -1] - 1) / 2.0
        low, high = ((reached <= one).sum(axis=1) for one in (np.floor(centre), np.ceil(centre)))
        return (values[order][low] + values[order][high]) / 2.0

    return middle


def score(of_sums: Callable[[Array], float], statistics: Array) -> Statistic:
    """Returns a function (BLEU, chrF) of summed statistics. Shapes: statistics [P, S], sums [S]."""
    return lambda counts: np.array([of_sums(summed) for summed in counts @ statistics])


def draw_resamples(prompts: int, resamples: int = 1000, seed: int = 0) -> Array:
    """Draws resamples: how often each prompt occurs in each. Shapes: -> [B, P], rows sum to P.

    Raises ValueError for 0 prompts.
    """
    if prompts < 1:
        raise ValueError("0 prompts: there is nothing to measure; give data with at least one row")
    shares = np.full(prompts, 1.0 / prompts)
    return np.random.default_rng(seed).multinomial(prompts, shares, resamples).astype(np.float64)


def estimate(statistic: Statistic, resamples: Array) -> Estimate | None:
    """Returns the value over all prompts and the 2.5 % and 97.5 % quantiles over the resamples.

    Resamples without a finite value are ignored. Returns None if the value itself is not finite.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        [value] = statistic(np.ones((1, resamples.shape[1])))
        if not np.isfinite(value):
            return None
        resampled = statistic(resamples)
    finite = resampled[np.isfinite(resampled)]
    low, high = np.quantile(finite, [0.025, 0.975]) if len(finite) else (value, value)
    return Estimate(float(value), float(low), float(high))


def estimate_all(statistics: Mapping[str, Statistic], resamples: Array) -> dict[str, Estimate]:
    """Estimates the statistics by name; omits those that are not finite."""
    estimates = {name: estimate(one, resamples) for name, one in statistics.items()}
    return {name: one for name, one in estimates.items() if one is not None}
