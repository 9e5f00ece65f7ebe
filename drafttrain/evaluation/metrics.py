"""Metrics of decoding: acceptance and cost of rounds, and speed.

Everything is first counted per prompt and divided once, at the end: rates over prompts are ratios
of sums and can be bootstrapped.

In a round the drafter proposed `drafted`, the verifier accepted `path`, and `emitted` was committed
(cut after the first EOS and at the maximal length). Its counts are:
- tokens: the emitted tokens;
- accepted: the draft tokens among them; accepted tokens that were cut do not count;
- discarded: draft tokens not emitted, rejected or cut; in a tree every node off the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from drafttrain.decoding.types import Calls, Output, Round
from drafttrain.evaluation import bootstrap
from drafttrain.evaluation.bootstrap import Array, Estimate, Ratio, Statistic, median, quotient
from drafttrain.evaluation.runner import BEAM, GENERATE, PLAIN, Decoded, Job


@dataclass(frozen=True)
class RoundCounts:
    """Sums over the rounds of each prompt, all [P]."""

    tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    passes: Array
    """Sequential drafter calls: a chain's tokens, a tree's levels, one for a block."""
    draft_seconds: Array | float = 0.0
    """Wall-clock time of drafting, and of target calls."""
    target_seconds: Array | float = 0.0
    calls: Mapping[str, Array] = field(default_factory=dict)
    """Calls of each drafter by name, if several contribute to a draft, and their time."""
    call_seconds: Mapping[str, Array] = field(default_factory=dict)
    expected: Array | None = None
    """Accepted tokens that the drafter expected; None if it estimates none."""

    @property
    def discarded(self) -> Array:
        return self.drafted - self.accepted

    def totals(self) -> dict[str, int | float]:
        """Returns the sums over all prompts, as in reports."""
        names = ("tokens", "rounds", "drafted", "accepted", "discarded", "passes")
        return {name: as_counted(getattr(self, name).sum()) for name in names}

    def by_drafter(self, names: Iterable[str]) -> Mapping[str, Array]:
        """Returns each drafter's calls; if not counted separately, all passes for each name."""
        return self.calls or dict.fromkeys(names, self.passes)

    def time_shares(self, total: float) -> dict[str, float]:
        """Returns the shares of the total decoding time; `other` includes encoding."""
        draft, target = (np.sum(one) / total for one in (self.draft_seconds, self.target_seconds))
        return {"draft": draft, "target": target, "other": max(0.0, 1.0 - draft - target)}


@dataclass(frozen=True)
class PositionRates:
    """Acceptance by draft position; 1-based position i is at index i - 1."""

    drafted: list[int | float]
    """Numbers of rounds, here and below; not integers if they are expectations."""
    accepted: list[int | float]
    reached: list[int | float]
    conditional: list[Estimate | None]
    """Share of the rounds that reached the position that also accepted it."""


@dataclass(frozen=True)
class CallCosts:
    """Cost of a call of each drafter in target calls, and its number of calls, by drafter name."""

    parameters: dict[str, float]
    """Parameters divided by the target's; the cost in `mbsu`."""
    measured: dict[str, float]
    """Mean seconds of a call divided by those of a target call in plain decoding, the cost in
    `swi`; 0 for a drafter that made no call."""
    calls: dict[str, int]

    @staticmethod
    def of(counts: RoundCounts, parameters: Mapping[str, float], target: float) -> CallCosts:
        """Computes the costs. target: mean seconds of a target call in plain decoding."""
        measured, calls = {}, {}
        for name, made in counts.by_drafter(parameters).items():
            seconds = np.sum(counts.call_seconds.get(name, counts.draft_seconds))
            calls[name] = int(made.sum())
            measured[name] = float(seconds) / calls[name] / target if calls[name] else 0.0
        return CallCosts(dict(parameters), measured, calls)


def as_counted(value: float) -> int | float:
    """Converts to int a value that is an integer up to rounding; others are expectations."""
    whole = round(value)
    return whole if abs(value - whole) < 1e-9 * max(1.0, abs(value)) else float(value)


def accepted_tokens(round: Round) -> int:
    """Returns the number of draft tokens that were accepted and emitted."""
    return min(len(round.path), len(round.emitted))


def round_facts(round: Round, show: Callable[[list[int]], list[Any]] = list) -> dict[str, Any]:
    """Returns a round in the format of samples and `generate --json`; for a tree with the indices
    of the accepted draft tokens. show: converts token ids for output."""
    accepted, drafted = accepted_tokens(round), show(list(round.drafted))
    path = {} if round.depth is None else {"path": list(round.path[:accepted])}
    return {"drafted": drafted, "accepted": accepted, **path, "emitted": show(list(round.emitted))}


def count_rounds(outputs: Sequence[Output]) -> RoundCounts:
    """Sums the counts of the rounds of each output."""

    def summed(fact) -> Array:
        return np.array([sum(map(fact, output.rounds)) for output in outputs], dtype=np.float64)

    def calls(round: Round, name: str) -> Calls:
        return (round.calls or {}).get(name, Calls(0, 0.0))

    apart = sorted({name for o in outputs for r in o.rounds for name in r.calls or ()})
    estimated = any(r.expected is not None for output in outputs for r in output.rounds)
    return RoundCounts(
        tokens=summed(lambda round: len(round.emitted)),
        rounds=summed(lambda round: 1),
        drafted=summed(lambda round: len(round.drafted)),
        accepted=summed(accepted_tokens),
        passes=summed(lambda round: round.passes),
        draft_seconds=summed(lambda round: round.draft_seconds),
        target_seconds=summed(lambda round: round.target_seconds),
        calls={name: summed(lambda r, name=name: calls(r, name).count) for name in apart},
        call_seconds={name: summed(lambda r, name=name: calls(r, name).seconds) for name in apart},
        expected=summed(lambda round: round.expected or 0.0) if estimated else None,
    )


def count_positions(outputs: Sequence[Output]) -> Array:
    """Counts the rounds of each prompt by draft position: drafted, accepted, reached. [3, P, K].

    A round counts as accepted at a position if its accepted tokens extend to it, and as reached if
    it drafted the position, accepted all before it and emitted a token there, either the draft
    token or the target's correction. A position is a level in a tree; it counts as drafted, and its
    token as missed, wherever the level's nodes are attached.
    """
    depth = max((r.levels for output in outputs for r in output.rounds), default=0)
    drafted, accepted, reached = counts = np.zeros((3, len(outputs), depth))
    for prompt, output in enumerate(outputs):
        for round in output.rounds:
            drafted[prompt, : round.levels] += 1
            accepted[prompt, : accepted_tokens(round)] += 1
            reached[prompt, : min(round.levels, len(round.emitted))] += 1
    return counts


def call_seconds(outputs: Sequence[Output]) -> tuple[float, float]:
    """Returns t_draft and t_target, the mean seconds of a draft token and of a target call."""
    counts = count_rounds(outputs)
    drafted, rounds = max(counts.drafted.sum(), 1), max(counts.rounds.sum(), 1)
    return float(counts.draft_seconds.sum() / drafted), float(counts.target_seconds.sum() / rounds)


def walltime_improvement(counts: RoundCounts, costs: Mapping[str, float]) -> Ratio:
    """Returns tokens per cost in target calls: n / (target calls + sum of c_i calls_i).

    With measured costs c_i it is the standardised walltime improvement (CS Drafting, Section 5).
    With parameter ratios it is RSD's memory-bound speed-up: tokens per round / (L r + 1), with L
    the sequential drafter calls per round (a tree's levels, 1 for a block) and r the ratio. For
    several drafters of one draft, L is the sum of their calls and r the mean of their ratios.
    Raises KeyError for a drafter without a cost.
    """
    drafting = sum(costs[name] * calls for name, calls in counts.by_drafter(costs).items())
    return Ratio(counts.tokens, counts.rounds + drafting)


def acceptance_figures(
    counts: RoundCounts, parameter_ratios: Mapping[str, float] | None = None
) -> dict[str, Statistic]:
    """Returns the acceptance metrics that the counts allow, by name in reports."""
    figures: dict[str, Statistic] = {
        # tokens emitted per target call, correction or bonus included (block efficiency)
        "mean_acceptance_length": Ratio(counts.tokens, counts.rounds),
        "acceptance_rate": Ratio(counts.accepted, counts.drafted),
        # SpecDec++ Eq. 2.2, N_discarded / N, and Eq. 2.3, N_target / N
        "discard_rate": Ratio(counts.discarded, counts.tokens),
        "verification_rate": Ratio(counts.rounds, counts.tokens),
    }
    if counts.expected is not None:  # OPT-Tree's mean E(A); 0 in rounds without a draft
        figures["expected_accepted"] = Ratio(counts.expected, counts.rounds)
    if parameter_ratios:
        figures["mbsu"] = walltime_improvement(counts, parameter_ratios)
    return figures


def speed_figures(run: Decoded, others: Sequence[Decoded], sampled: bool) -> dict[str, Statistic]:
    """Returns tokens per second, latency and speedups over `others`; times are medians of repeats.

    Tokens per second and speedups are over all inputs together, latency is the median over inputs.
    A speedup is the ratio of times for the same inputs, whatever the output lengths; if outputs are
    sampled, so that lengths differ by chance, it is the ratio of tokens per second. Methods with a
    stop policy are compared with the best fixed length too (`fastest_fixed`, SpecDec++ Section 4).
    """
    figures: dict[str, Statistic] = {
        "tokens_per_second": Ratio(run.token_counts, run.cost_seconds),
        "ms_per_token": median(1e3 * run.median_seconds / run.token_counts),
    }
    names = {PLAIN: "speedup", GENERATE: "speedup_vs_generate", BEAM: "speedup_vs_beam"}
    peers = {names[other.job.way]: other for other in others if other.job.way in names}
    if (best := fastest_fixed(run, others)) is not None:
        peers["speedup_vs_fixed"] = best
    for name, other in peers.items():
        figures[name] = Ratio(other.cost_seconds, run.cost_seconds)
        if sampled:
            theirs = Ratio(other.token_counts, other.cost_seconds)
            figures[name] = quotient(figures["tokens_per_second"], theirs)
    return figures


def fastest_fixed(run: Decoded, others: Sequence[Decoded]) -> Decoded | None:
    """Returns the chains of fixed length of the same drafter that have the most tokens per second,
    lossless ones for a lossless run, else those with the same verifier.

    None if there are none, or if `run` is one or drafts no chains.
    """

    def is_fixed(job: Job) -> bool:
        return job.way == "chain" and job.method.stop.rule.name == "fixed"

    def is_peer(job: Job) -> bool:
        alike = job.lossless if run.job.lossless else job.method.verifier == method.verifier
        return is_fixed(job) and alike and job.method.drafter is method.drafter

    method = run.job.method
    if run.job.way != "chain" or is_fixed(run.job):
        return None
    own = [one for one in others if is_peer(one.job)]
    return max(own, key=lambda one: one.token_counts.sum() / one.cost_seconds.sum(), default=None)


def position_rates(counts: Array, resamples: Array) -> PositionRates | None:
    """Returns acceptance by position with intervals; None if nothing was drafted.

    counts: [3, P, K] from `count_positions`.
    """
    if counts.shape[2] == 0:
        return None
    pairs = zip(counts[1].T, counts[2].T, strict=True)  # accepted, reached
    return PositionRates(
        *(list(map(as_counted, own)) for own in counts.sum(axis=1)),
        conditional=[bootstrap.estimate(Ratio(*pair), resamples) for pair in pairs],
    )


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Returns the 0-based position of the first different token; None if all are equal.

    If one sequence is a prefix of the other, it is the length of the shorter.
    """
    pairs = enumerate(zip_longest(tokens, others))
    return next((position for position, (token, other) in pairs if token != other), None)


def identical(outputs: Sequence[Output], others: Sequence[Output]) -> Array:
    """Returns 1 for each prompt whose two outputs have equal tokens, else 0. Shapes: -> [P]."""
    pairs = zip(outputs, others, strict=True)
    return np.array([float(first_difference(a.tokens, b.tokens) is None) for a, b in pairs])
