"""Acceptance and cost of speculative decoding, from the facts of its rounds.

Everything is counted for each prompt first and divided once, at the end, so that rates over
prompts are ratios of sums and can be bootstrapped.

The counts of a round, where the drafter proposed `drafted`, the verifier accepted `path`, and
`emitted` was committed (cut after the first EOS and at the maximal length):
- tokens: what was emitted;
- accepted: the draft tokens among them; accepted tokens that were cut do not count;
- discarded: drafted but not emitted, whether rejected or cut; of a tree, every node off the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drafttrain.decoding.types import Calls, Output, Round
from drafttrain.evaluation.bootstrap import Array, Estimate, Ratio, estimate_ratio, with_interval


@dataclass(frozen=True)
class Counts:
    """Sums over the rounds of each prompt, all [P]."""

    tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    passes: Array
    """Sequential drafter calls: a chain's tokens, a tree's levels, one for a block."""
    draft_seconds: Array | None = None
    """Wall clock of drafting; None where nothing was timed."""
    calls: Mapping[str, Array] = field(default_factory=dict)
    """Calls of each drafter, where several have a part in a draft."""
    call_seconds: Mapping[str, Array] = field(default_factory=dict)
    """Their wall clock."""
    expected: Array | None = None
    """Drafted tokens that the drafter expected to be accepted; None where it works out nothing."""

    @property
    def discarded(self) -> Array:
        return self.drafted - self.accepted

    def totals(self) -> dict[str, int | float]:
        """Over all prompts, as reports have them."""
        names = ("tokens", "rounds", "drafted", "accepted", "discarded", "passes")
        return {name: as_counted(getattr(self, name).sum()) for name in names}


@dataclass(frozen=True)
class PositionCounts:
    """Rounds of each prompt by draft position, all [P, K]; column i is position i + 1.

    A position is a place in a chain and a level in a tree: a level counts as drafted, and a token
    at it as missed, wherever in the tree its nodes hang.
    """

    drafted: Array
    """Rounds that drafted this position."""
    accepted: Array
    """Rounds whose accepted tokens reach this position."""
    reached: Array
    """Rounds that drafted this position, accepted all before it, and emitted a token at it:
    the drafted one, or the target's correction."""


@dataclass(frozen=True)
class PositionRates:
    """Acceptance by draft position, 1-based position i at index i - 1."""

    drafted: list[int | float]
    """Rounds; not whole where they are expected, not played."""
    accepted: list[int | float]
    reached: list[int | float]
    acceptance: list[Estimate]
    """Of the rounds that drafted the position, the share accepted up to it."""
    conditional: list[Estimate | None]
    """Of the rounds that reached the position, the share that accepted it."""


def as_counted(value: float) -> int | float:
    """A whole number where it is one, up to rounding; else an expectation as it is."""
    whole = round(value)
    return whole if abs(value - whole) < 1e-9 * max(1.0, abs(value)) else float(value)


def accepted_tokens(round: Round) -> int:
    """Drafted tokens that were accepted and emitted."""
    return min(len(round.path), len(round.emitted))


def count_rounds(outputs: Sequence[Output]) -> Counts:
    """Sums over the rounds of each output."""

    def summed(fact) -> Array:
        return np.array([sum(map(fact, output.rounds)) for output in outputs], dtype=np.float64)

    apart = sorted({name for o in outputs for r in o.rounds for name in r.calls or ()})
    estimated = any(r.expected is not None for output in outputs for r in output.rounds)
    return Counts(
        tokens=summed(lambda round: len(round.emitted)),
        rounds=summed(lambda round: 1),
        drafted=summed(lambda round: len(round.drafted)),
        accepted=summed(accepted_tokens),
        passes=summed(lambda round: round.passes),
        draft_seconds=summed(lambda round: round.draft_seconds),
        calls={name: summed(lambda r, name=name: _calls(r, name).count) for name in apart},
        call_seconds={name: summed(lambda r, name=name: _calls(r, name).seconds) for name in apart},
        expected=summed(lambda round: round.expected or 0.0) if estimated else None,
    )


def _calls(round: Round, name: str) -> Calls:
    return (round.calls or {}).get(name, Calls(0, 0.0))


def count_positions(outputs: Sequence[Output]) -> PositionCounts:
    """Rounds by draft position: the place in a chain, the level of a tree."""
    depth = max((r.levels for output in outputs for r in output.rounds), default=0)
    drafted = np.zeros((len(outputs), depth))
    accepted = np.zeros((len(outputs), depth))
    reached = np.zeros((len(outputs), depth))
    for prompt, output in enumerate(outputs):
        for round in output.rounds:
            drafted[prompt, : round.levels] += 1
            accepted[prompt, : accepted_tokens(round)] += 1
            reached[prompt, : min(round.levels, len(round.emitted))] += 1
    return PositionCounts(drafted, accepted, reached)


def mean_acceptance_length(counts: Counts) -> Ratio:
    """Tokens emitted per target call, correction or bonus included (block efficiency)."""
    return Ratio(counts.tokens, counts.rounds)


def walltime_improvement(counts: Counts, costs: Mapping[str, float]) -> Ratio:
    """Tokens over the time of all calls, in target calls: n / (target calls + sum of c_i calls_i).

    With measured costs c_i: the standardised walltime improvement (CS Drafting, Section 5). With
    parameter ratios: the same by model size, which is RSD's memory-bound speed-up, tokens per round
    / (L r + 1), L being the sequential drafter calls a round (a tree's levels, 1 for a block) and r
    the ratio. Of drafters side by side, L is the sum of their calls and r the mean of their ratios.
    Raises KeyError for a drafter without a cost.
    """
    drafting = np.zeros_like(counts.rounds)
    for name, calls in _calls_by_drafter(counts, costs).items():
        drafting = drafting + costs[name] * calls
    return Ratio(counts.tokens, counts.rounds + drafting)


def draft_time(counts: Counts, target_seconds: float) -> Ratio:
    """Seconds of drafting a round over those of a target call that decodes plainly: what a draft
    takes, in plain tokens."""
    seconds = np.zeros_like(counts.rounds) if counts.draft_seconds is None else counts.draft_seconds
    return Ratio(seconds, counts.rounds * target_seconds)


def mean_target_seconds(outputs: Sequence[Output]) -> float:
    """Mean seconds of a target call."""
    rounds = [round for output in outputs for round in output.rounds]
    return sum(round.target_seconds for round in rounds) / len(rounds)


def measured_costs(counts: Counts, names: Sequence[str], target_seconds: float) -> dict[str, float]:
    """Mean seconds of a call of each drafter over those of a target call; 0 where none was made."""
    whole = np.zeros_like(counts.passes) if counts.draft_seconds is None else counts.draft_seconds
    seconds = counts.call_seconds or dict.fromkeys(names, whole)
    found = {}
    for name, calls in _calls_by_drafter(counts, names).items():
        made = float(calls.sum())
        found[name] = float(seconds[name].sum()) / made / target_seconds if made else 0.0
    return found


def _calls_by_drafter(counts: Counts, names: Iterable[str]) -> Mapping[str, Array]:
    """Calls counted apart; where none are, all are those of the one drafter named."""
    return counts.calls or {name: counts.passes for name in names}


def acceptance_metrics(
    counts: Counts, resamples: Array, parameter_ratios: Mapping[str, float] | None = None
) -> dict[str, Estimate]:
    """Every acceptance metric that the counts allow, by its name in reports."""
    ratios = {
        "mean_acceptance_length": mean_acceptance_length(counts),
        "accepted_per_round": Ratio(counts.accepted, counts.rounds),
        "acceptance_rate": Ratio(counts.accepted, counts.drafted),
        # SpecDec++ Eq. 2.2, N_discarded / N, and Eq. 2.3, N_target / N
        "discard_rate": Ratio(counts.discarded, counts.tokens),
        "verification_rate": Ratio(counts.rounds, counts.tokens),
    }
    if counts.expected is not None:  # OPT-Tree's mean E(A); rounds without a draft expect none
        ratios["expected_accepted"] = Ratio(counts.expected, counts.rounds)
    if parameter_ratios:
        ratios["mbsu"] = walltime_improvement(counts, parameter_ratios)
    estimates = {name: estimate_ratio(ratio, resamples) for name, ratio in ratios.items()}
    return {name: found for name, found in estimates.items() if found is not None}


def position_rates(counts: PositionCounts, resamples: Array) -> PositionRates | None:
    """Acceptance by position with intervals; None where nothing was drafted."""
    if counts.drafted.shape[1] == 0:
        return None
    return PositionRates(
        drafted=list(map(as_counted, counts.drafted.sum(axis=0))),
        accepted=list(map(as_counted, counts.accepted.sum(axis=0))),
        reached=list(map(as_counted, counts.reached.sum(axis=0))),
        acceptance=[
            rate or Estimate(0.0, 0.0, 0.0)
            for rate in _column_rates(counts.accepted, counts.drafted, resamples)
        ],
        conditional=_column_rates(counts.accepted, counts.reached, resamples),
    )


def _column_rates(
    numerators: Array, denominators: Array, resamples: Array
) -> list[Estimate | None]:
    above, below = numerators.sum(axis=0), denominators.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = (resamples @ numerators) / (resamples @ denominators)
    return [
        with_interval(float(above[i] / below[i]), values[:, i]) if below[i] else None
        for i in range(len(below))
    ]


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Position of the first token that differs, counted from 0; None where all are equal.

    Where one is the beginning of the other, it is the length of the shorter.
    """
    for position, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return position
    return None if len(tokens) == len(others) else min(len(tokens), len(others))


def identical(outputs: Sequence[Output], others: Sequence[Output]) -> Array:
    """1 where two outputs are equal token for token, else 0. Shapes: -> [P]."""
    pairs = zip(outputs, others, strict=True)
    return np.array([float(list(a.tokens) == list(b.tokens)) for a, b in pairs])
