"""From replayed counts to metrics, and from metrics to the policy chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    draw_resamples,
    estimate_ratio,
    with_interval,
)
from drafttrain.evaluation.metrics import acceptance_metrics
from drafttrain.evaluation.stops.costs import Prices
from drafttrain.evaluation.stops.replay import Candidate, Kind, PolicyCounts
from drafttrain.evaluation.stops.report import PolicyResult

ORACLE = Candidate("oracle")


def throughput(counts: PolicyCounts, place: int, candidate: Candidate, prices: Prices) -> Ratio:
    """Modelled tokens a second of a policy (Eq. 2.1, and what the policy itself takes). [P]."""
    seconds = prices.costs.seconds(
        counts.drafted[:, place], counts.rounds[:, place], counts.computed[:, place]
    )
    return Ratio(
        counts.tokens[:, place], seconds + prices.judging(candidate) * counts.judged[:, place]
    )


def candidates_of(
    lengths: Sequence[int],
    by_rows: Mapping[Kind, Sequence[float]],
    heads: Sequence[str],
    thresholds: Sequence[float],
    max_draft: int,
) -> list[Candidate]:
    """Every policy to replay: fixed lengths, those that go by rows with their values, each head at
    each h, the oracle."""
    return [
        *[Candidate("fixed", k) for k in lengths],
        *[
            Candidate(kind, value, max_draft=max_draft)
            for kind, values in by_rows.items()
            for value in values
        ],
        *[Candidate("head", h, head, max_draft) for head in heads for h in thresholds],
        ORACLE,
    ]


def best_of(
    counts: PolicyCounts, candidates: Sequence[Candidate], prices: Prices, kinds: Sequence[str]
) -> Candidate:
    """The policy of some kinds with the most modelled tokens a second; the first on ties."""

    def rate(place: int) -> float:
        ratio = throughput(counts, place, candidates[place], prices)
        return float(ratio.numerators.sum() / ratio.denominators.sum())

    places = [place for place, candidate in enumerate(candidates) if candidate.kind in kinds]
    return candidates[max(places, key=rate)]


def policy_results(
    counts: PolicyCounts,
    candidates: Sequence[Candidate],
    prices: Prices,
    best_fixed: Candidate,
    bootstrap: int,
) -> list[PolicyResult]:
    """Metrics of every policy with intervals over prompts, paired where policies are compared."""
    resamples = draw_resamples(len(counts.tokens), bootstrap)
    ratios = [throughput(counts, i, one, prices) for i, one in enumerate(candidates)]
    rates = {
        candidate: _Rate.of(ratio, resamples)
        for candidate, ratio in zip(candidates, ratios, strict=True)
    }
    fixed, oracle = rates[best_fixed], rates[ORACLE]
    results = []
    for place, candidate in enumerate(candidates):
        own, seen = rates[candidate], counts.of(place)
        metrics = acceptance_metrics(seen, resamples)
        speed = estimate_ratio(ratios[place], resamples)
        metrics |= {
            "tokens_per_second": speed,
            "speedup": _scaled(speed, 1.0 / prices.plain_tokens_per_second),
            "gain": own.compare(fixed, lambda mine, theirs: mine / theirs - 1.0),
            "regret": own.compare(oracle, lambda mine, theirs: 1.0 - mine / theirs),
        }
        if candidate not in (best_fixed, ORACLE):
            metrics["oracle_share"] = own.share(fixed, oracle)
        results.append(
            PolicyResult(
                name=candidate.name,
                kind=candidate.kind,
                value=candidate.value,
                head=candidate.head,
                metrics=metrics,
                totals=seen.totals(),
            )
        )
    return results


@dataclass(frozen=True)
class _Rate:
    """A ratio of sums and its resampled values; comparisons are paired."""

    value: float
    resampled: Array

    @staticmethod
    def of(ratio: Ratio, resamples: Array) -> _Rate:
        value = float(ratio.numerators.sum() / ratio.denominators.sum())
        return _Rate(value, (resamples @ ratio.numerators) / (resamples @ ratio.denominators))

    def compare(self, other: _Rate, by) -> Estimate:
        return with_interval(by(self.value, other.value), by(self.resampled, other.resampled))

    def share(self, fixed: _Rate, oracle: _Rate) -> Estimate:
        """How much of the way from the best fixed length to the oracle is gone."""
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled = (self.resampled - fixed.resampled) / (oracle.resampled - fixed.resampled)
        way = oracle.value - fixed.value
        return with_interval((self.value - fixed.value) / way if way else 0.0, resampled)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor)
