"""From replayed counts to metrics, and from metrics to the policy chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from drafttrain.evaluation.stops.prices import AnyCandidate, Prices
from drafttrain.evaluation.stops.replay import (
    OF_ROWS,
    Candidate,
    Kind,
    PolicyCounts,
    VerifierOfChains,
)
from drafttrain.evaluation.stops.report import BatchChoice, PolicyResult

ORACLE = Candidate("oracle")
CHAINS = ("fixed", *OF_ROWS, "head")
"""Kinds of stop policies that decoding can follow."""
CHOSEN = (*CHAINS, "tree", "cascade")
"""Those, and what is no chain of one drafter."""
ALIKE = 0.01
"""Share of the speed that heads may differ by and be taken for alike."""


def throughput(
    counts: PolicyCounts, place: int, candidate: AnyCandidate, prices: Prices, batch_size: int = 1
) -> Ratio:
    """Predicted tokens a second of a candidate. [P]."""
    seconds = prices.seconds(counts, place, candidate, batch_size)
    return Ratio(counts.tokens[:, place], seconds)


def candidates_of(
    lengths: Sequence[int],
    by_rows: Mapping[Kind, Sequence[float]],
    heads: Sequence[str],
    thresholds: Sequence[float],
    max_draft: int,
    verifiers: Sequence[VerifierOfChains] = ("rejection",),
) -> list[Candidate]:
    """Every policy to replay under every rule: fixed lengths, those that go by rows with their
    values, each head at each h; and the oracle, which no rule rejects anything of."""
    policies = [
        *[Candidate("fixed", k) for k in lengths],
        *[
            Candidate(kind, value, max_draft=max_draft)
            for kind, values in by_rows.items()
            for value in values
        ],
        *[Candidate("head", h, head, max_draft) for head in heads for h in thresholds],
    ]
    ruled = [replace(policy, verifier=rule) for rule in verifiers for policy in policies]
    return [*ruled, ORACLE]


def best_of(
    counts: PolicyCounts,
    candidates: Sequence[AnyCandidate],
    prices: Prices,
    kinds: Sequence[str],
    batch_size: int = 1,
    depths: Mapping[str, int] | None = None,
) -> AnyCandidate:
    """The policy of some kinds with the most predicted tokens a second; the first on ties.

    depths: the heads' numbers of layers. Where a head is the best, it is the one with the fewest
    of those that are `ALIKE`: so little is not told apart on a few prompts.
    """
    order = ranked(counts, candidates, prices, kinds, batch_size)
    if depths is None or order[0].kind != "head":
        return order[0]
    rates = {
        one: predicted_rate(counts, candidates.index(one), one, prices, batch_size)
        for one in order
        if one.kind == "head"
    }
    least = (1 - ALIKE) * rates[order[0]]
    return min((one for one in rates if rates[one] >= least), key=lambda one: depths[one.head])


def ranked(
    counts: PolicyCounts,
    candidates: Sequence[AnyCandidate],
    prices: Prices,
    kinds: Sequence[str],
    batch_size: int = 1,
) -> list[AnyCandidate]:
    """The policies of some kinds by falling predicted tokens a second."""
    rates = {
        place: predicted_rate(counts, place, candidate, prices, batch_size)
        for place, candidate in enumerate(candidates)
        if candidate.kind in kinds
    }
    return [candidates[place] for place in sorted(rates, key=rates.__getitem__, reverse=True)]


def predicted_rate(
    counts: PolicyCounts, place: int, candidate: AnyCandidate, prices: Prices, batch_size: int
) -> float:
    """Tokens a second of all prompts together."""
    ratio = throughput(counts, place, candidate, prices, batch_size)
    return float(ratio.numerators.sum() / ratio.denominators.sum())


def batch_choice(
    counts: PolicyCounts,
    candidates: Sequence[AnyCandidate],
    prices: Prices,
    batch_size: int,
    bootstrap: int,
    depths: Mapping[str, int] | None = None,
) -> BatchChoice:
    """What is best at a batch size, and what it is worth there."""
    best, chain, fixed = (
        best_of(counts, candidates, prices, kinds, batch_size, depths)
        for kinds in (CHOSEN, CHAINS, ("fixed",))
    )
    resamples = draw_resamples(len(counts.tokens), bootstrap)
    own, theirs, oracle = (
        throughput(counts, candidates.index(one), one, prices, batch_size)
        for one in (best, fixed, ORACLE)
    )
    rates = [_Rate.of(ratio, resamples) for ratio in (own, theirs, oracle)]
    speed = estimate_ratio(own, resamples)
    assert speed is not None, "outputs take time"
    return BatchChoice(
        batch_size=batch_size,
        best=best.name,
        best_chain=chain.name,
        best_fixed=fixed.name,
        tokens_per_second=speed,
        gain=rates[0].compare(rates[1], lambda mine, fixed: mine / fixed - 1.0),
        regret=rates[0].compare(rates[2], lambda mine, oracle: 1.0 - mine / oracle),
        plain_tokens_per_second=prices.rounds[batch_size].plain_tokens_per_second,
    )


def policy_results(
    counts: PolicyCounts,
    candidates: Sequence[AnyCandidate],
    prices: Prices,
    best_fixed: AnyCandidate,
    bootstrap: int,
) -> list[PolicyResult]:
    """Metrics of every policy at batch size 1, with intervals over prompts that are paired where
    policies are compared."""
    resamples = draw_resamples(len(counts.tokens), bootstrap)
    ratios = [throughput(counts, i, one, prices) for i, one in enumerate(candidates)]
    rates = {
        candidate: _Rate.of(ratio, resamples)
        for candidate, ratio in zip(candidates, ratios, strict=True)
    }
    fixed, oracle = rates[best_fixed], rates[ORACLE]
    to_gain = oracle.compare(fixed, lambda most, length: most / length - 1.0).low > 0.0
    results = []
    for place, candidate in enumerate(candidates):
        own, seen = rates[candidate], counts.of(place)
        metrics = acceptance_metrics(seen, resamples)
        speed = estimate_ratio(ratios[place], resamples)
        metrics |= {
            "tokens_per_second": speed,
            "speedup": _scaled(speed, 1.0 / prices.rounds[1].plain_tokens_per_second),
            "gain": own.compare(fixed, lambda mine, theirs: mine / theirs - 1.0),
            "regret": own.compare(oracle, lambda mine, theirs: 1.0 - mine / theirs),
        }
        if to_gain and candidate not in (best_fixed, ORACLE):
            metrics["oracle_share"] = own.share(fixed, oracle)
        results.append(
            PolicyResult(
                name=candidate.name,
                kind=candidate.kind,
                value=candidate.value,
                head=candidate.head,
                verifier=candidate.verifier,
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
        """How much of the way from the best fixed length to the oracle is gone; of use where the
        oracle is the faster one, beyond its interval."""
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled = (self.resampled - fixed.resampled) / (oracle.resampled - fixed.resampled)
        way = oracle.value - fixed.value
        return with_interval((self.value - fixed.value) / way, resampled)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor)
