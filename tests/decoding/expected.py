"""Expected distributions, computed without production code."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping

import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafttrain.decoding.types import Sampling

Law = dict[tuple[int, ...], float]
"""Probabilities of outputs."""


def expected_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Applies Transformers' warpers, in float64.

    Temperature 0 gives the point mass on the first arg-max. Shapes: [..., V] -> [..., V].
    """
    rows = logits.double().reshape(-1, logits.shape[-1])
    if sampling.greedy:
        best = torch.nn.functional.one_hot(rows.argmax(-1), rows.shape[-1])
        return best.double().view_as(logits)
    rows = TemperatureLogitsWarper(sampling.temperature)(None, rows)
    if sampling.top_k > 0:
        rows = TopKLogitsWarper(sampling.top_k)(None, rows)
    if sampling.top_p < 1.0:
        rows = TopPLogitsWarper(sampling.top_p)(None, rows)
    if sampling.min_p > 0.0:
        rows = MinPLogitsWarper(sampling.min_p)(None, rows)
    return rows.softmax(dim=-1).view_as(logits)


def law_of_sampling(
    logits: Callable[[tuple[int, ...]], Tensor], sampling: Sampling, longest: int, eos: int = 1
) -> Law:
    """Returns the distribution of the outputs of plain sampling.

    logits: output tokens so far -> logits [V] of the next token. longest: maximal number of tokens.
    """
    law: Law = {}

    def extend(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == longest or tokens[-1:] == (eos,):
            law[tokens] = probability
            return
        for token, p in enumerate(expected_probs(logits(tokens), sampling).tolist()):
            if p > 0.0:
                extend((*tokens, token), probability * p)

    extend((), 1.0)
    return law


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
