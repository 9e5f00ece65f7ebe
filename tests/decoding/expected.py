"""Expected distributions, computed without production code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from drafttrain.decoding.types import Sampling


def expected_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Applies temperature, then top-k with ties, then the smallest set of mass top_p, then min_p.

    Temperature 0 gives the point mass on the first arg-max. Shapes: [..., V] -> [..., V], float64.
    """
    rows = np.asarray(logits.tolist(), dtype=np.float64)
    return torch.from_numpy(np.apply_along_axis(_expected_row, -1, rows, sampling))


def _expected_row(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    if sampling.temperature == 0.0:
        return np.eye(len(row))[row.argmax()]
    probs = np.exp((row - row.max()) / sampling.temperature)
    falling = np.argsort(-probs, kind="stable")
    if 0 < sampling.top_k < len(row):
        probs = np.where(probs >= probs[falling[sampling.top_k - 1]], probs, 0.0)
    probs = probs / probs.sum()
    if sampling.top_p < 1.0:
        before = np.cumsum(probs[falling]) - probs[falling]
        probs[falling[before >= sampling.top_p]] = 0.0
    probs[probs < sampling.min_p * probs.max()] = 0.0
    return probs / probs.sum()


def chi_square(
    counts: Mapping[Hashable, int], law: Mapping[Hashable, float], least: float = 8.0
) -> float:
    """Returns the p-value of a chi-square test of counts against a distribution.

    Outcomes expected fewer than `least` times are pooled. The p-value is 0 if an outcome outside
    the distribution occurred.
    """
    if not set(counts) <= set(law):
        return 0.0
    runs, cells = sum(counts.values()), Counter[Hashable]()
    seen: Counter[Hashable] = Counter()
    for outcome, probability in law.items():
        cell = outcome if runs * probability >= least else "rare"
        cells[cell] += runs * probability
        seen[cell] += counts.get(outcome, 0)
    return float(chisquare([seen[cell] for cell in cells], list(cells.values())).pvalue)
