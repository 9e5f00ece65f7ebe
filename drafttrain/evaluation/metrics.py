"""Every figure of decoding: acceptance and cost of rounds, speed, real-time factors.

Everything is counted for each prompt first and divided once, at the end, so that rates over
prompts are ratios of sums and can be bootstrapped.

The counts of a round, where the drafter proposed `drafted`, the verifier accepted `path`, and
`emitted` was committed (cut after the first EOS and at the maximal length):
- tokens: what was emitted;
- accepted: the draft tokens among them; accepted tokens that were cut do not count;
- discarded: drafted but not emitted, whether rejected or cut; of a tree, every node off the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drafttrain.decoding.types import Calls, Output, Round
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    Statistic,
    estimate,
    median,
    quotient,
)
from drafttrain.evaluation.runner import BEAM, GENERATE, PLAIN, Decoded


@dataclass(frozen=True)
class Counts:
    """Sums over the rounds of each prompt, all [P]."""

    tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    passes: Array
    """Sequential drafter calls: a chain's tokens, a tree's levels, one for a block."""
    draft_seconds: Array | float = 0.0
    """Wall clock of drafting."""
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

    def by_drafter(self, names: Iterable[str]) -> Mapping[str, Array]:
        """Calls counted apart; where none are, all are those of the one drafter named."""
        return self.calls or dict.fromkeys(names, self.passes)


@dataclass(frozen=True)
class PositionRates:
    """Acceptance by draft position, 1-based position i at index i - 1."""

    drafted: list[int | float]
    """Rounds; not whole where they are expected, not played."""
    accepted: list[int | float]
    reached: list[int | float]
    conditional: list[Estimate | None]
    """Of the rounds that reached the position, the share that accepted it."""


@dataclass(frozen=True)
class CallCosts:
    """What a call of each drafter costs, in target calls, and how many it made; by its name."""

    parameters: dict[str, float]
    """Parameters over the target's, on which `mbsu` rests."""
    measured: dict[str, float]
    """Mean seconds over those of a call of the target as it decodes plainly, for `swi`; 0 of a
    drafter that made no call."""
    calls: dict[str, int]

    @staticmethod
    def of(counts: Counts, parameters: Mapping[str, float], target_seconds: float) -> CallCosts:
        """target_seconds: the mean of a target call of plain decoding."""
        measured, calls = {}, {}
        for name, made in counts.by_drafter(parameters).items():
            seconds = np.sum(counts.call_seconds.get(name, counts.draft_seconds))
            calls[name] = int(made.sum())
            measured[name] = float(seconds) / calls[name] / target_seconds if calls[name] else 0.0
        return CallCosts(dict(parameters), measured, calls)


def as_counted(value: float) -> int | float:
    """A whole number where it is one, up to rounding; else an expectation as it is."""
    whole = round(value)
    return whole if abs(value - whole) < 1e-9 * max(1.0, abs(value)) else float(value)


def accepted_tokens(round: Round) -> int:
    """Drafted tokens that were accepted and emitted."""
    return min(len(round.path), len(round.emitted))


def round_facts(
    round: Round, show: Callable[[list[int]], list[Any]] = list
) -> dict[str, int | list[Any]]:
    """A round as samples and `generate --json` have it; of a tree also which of the drafted tokens
    were accepted. show: how tokens are written."""
    accepted = accepted_tokens(round)
    path = {} if round.depth is None else {"path": list(round.path[:accepted])}
    drafted, emitted = show(list(round.drafted)), show(list(round.emitted))
    return {"drafted": drafted, "accepted": accepted, **path, "emitted": emitted}


def count_rounds(outputs: Sequence[Output]) -> Counts:
    """Sums over the rounds of each output."""

    def summed(fact) -> Array:
        return np.array([sum(map(fact, output.rounds)) for output in outputs], dtype=np.float64)

    def calls(round: Round, name: str) -> Calls:
        return (round.calls or {}).get(name, Calls(0, 0.0))

    apart = sorted({name for o in outputs for r in o.rounds for name in r.calls or ()})
    estimated = any(r.expected is not None for output in outputs for r in output.rounds)
    return Counts(
        tokens=summed(lambda round: len(round.emitted)),
        rounds=summed(lambda round: 1),
        drafted=summed(lambda round: len(round.drafted)),
        accepted=summed(accepted_tokens),
        passes=summed(lambda round: round.passes),
        draft_seconds=summed(lambda round: round.draft_seconds),
        calls={name: summed(lambda r, name=name: calls(r, name).count) for name in apart},
        call_seconds={name: summed(lambda r, name=name: calls(r, name).seconds) for name in apart},
        expected=summed(lambda round: round.expected or 0.0) if estimated else None,
    )


def count_positions(outputs: Sequence[Output]) -> Array:
    """Rounds of each prompt by draft position, [3, P, K]: those that drafted it, those whose
    accepted tokens reach it, and those that drafted it, accepted all before it, and emitted a token
    at it: the drafted one, or the target's correction.

    A position is a place in a chain and a level in a tree: a level counts as drafted, and a token
    at it as missed, wherever in the tree its nodes hang.
    """
    depth = max((r.levels for output in outputs for r in output.rounds), default=0)
    drafted, accepted, reached = counts = np.zeros((3, len(outputs), depth))
    for prompt, output in enumerate(outputs):
        for round in output.rounds:
            drafted[prompt, : round.levels] += 1
            accepted[prompt, : accepted_tokens(round)] += 1
            reached[prompt, : min(round.levels, len(round.emitted))] += 1
    return counts


def time_shares(outputs: Sequence[Output]) -> dict[str, float]:
    """Shares of the wall clock of decoding, by the rounds' clocks; `other` includes encoding."""
    total = sum(output.seconds for output in outputs)
    rounds = [round for output in outputs for round in output.rounds]
    draft = sum(round.draft_seconds for round in rounds) / total
    target = sum(round.target_seconds for round in rounds) / total
    return {"draft": draft, "target": target, "other": max(0.0, 1.0 - draft - target)}


def call_seconds(outputs: Sequence[Output]) -> tuple[float, float]:
    """t_draft and t_target: mean seconds of a draft token and of a target call, by the rounds' own
    clocks."""
    rounds = [one for output in outputs for one in output.rounds]
    drafted = sum(len(one.drafted) for one in rounds)
    return (
        sum(one.draft_seconds for one in rounds) / max(drafted, 1),
        sum(one.target_seconds for one in rounds) / max(len(rounds), 1),
    )


def walltime_improvement(counts: Counts, costs: Mapping[str, float]) -> Ratio:
    """Tokens over the time of all calls, in target calls: n / (target calls + sum of c_i calls_i).

    With measured costs c_i: the standardised walltime improvement (CS Drafting, Section 5). With
    parameter ratios: the same by model size, which is RSD's memory-bound speed-up, tokens per round
    / (L r + 1), L being the sequential drafter calls a round (a tree's levels, 1 for a block) and r
    the ratio. Of drafters side by side, L is the sum of their calls and r the mean of their ratios.
    Raises KeyError for a drafter without a cost.
    """
    drafting = sum(costs[name] * calls for name, calls in counts.by_drafter(costs).items())
    return Ratio(counts.tokens, counts.rounds + drafting)


def acceptance_figures(
    counts: Counts, parameter_ratios: Mapping[str, float] | None = None
) -> dict[str, Statistic]:
    """Every acceptance metric that the counts allow, by its name in reports."""
    figures: dict[str, Statistic] = {
        # tokens emitted per target call, correction or bonus included (block efficiency)
        "mean_acceptance_length": Ratio(counts.tokens, counts.rounds),
        "acceptance_rate": Ratio(counts.accepted, counts.drafted),
        # SpecDec++ Eq. 2.2, N_discarded / N, and Eq. 2.3, N_target / N
        "discard_rate": Ratio(counts.discarded, counts.tokens),
        "verification_rate": Ratio(counts.rounds, counts.tokens),
    }
    if counts.expected is not None:  # OPT-Tree's mean E(A); rounds without a draft expect none
        figures["expected_accepted"] = Ratio(counts.expected, counts.rounds)
    if parameter_ratios:
        figures["mbsu"] = walltime_improvement(counts, parameter_ratios)
    return figures


def speed_figures(run: Decoded, others: Sequence[Decoded], sampled: bool) -> dict[str, Statistic]:
    """Tokens a second, latency and speed-ups over `others`; times are medians over the repeats.

    Tokens a second and speed-ups are of all inputs together, latency is the median of single ones.
    A speed-up compares the time for the same inputs, whatever the lengths of the outputs; where
    outputs are sampled, and differ in length by chance alone, it compares tokens a second.
    """
    tokens = token_counts(run)
    figures: dict[str, Statistic] = {
        "tokens_per_second": Ratio(tokens, run.cost_seconds),
        "ms_per_token": median(1e3 * run.median_seconds / tokens),
    }
    ways = {PLAIN: "speedup", GENERATE: "speedup_vs_generate", BEAM: "speedup_vs_beam"}
    for other in others:
        if other.job.way in ways:
            speedup: Statistic = Ratio(other.cost_seconds, run.cost_seconds)
            if sampled:
                theirs = Ratio(token_counts(other), other.cost_seconds)
                speedup = quotient(figures["tokens_per_second"], theirs)
            figures[ways[other.job.way]] = speedup
    return figures


def token_counts(run: Decoded) -> Array:
    """[P] tokens of every output."""
    return np.array([float(len(output.tokens)) for output in run.outputs])


def position_rates(counts: Array, resamples: Array) -> PositionRates | None:
    """Acceptance by position with intervals; None where nothing was drafted.

    counts: as of `count_positions`, [3, P, K].
    """
    if counts.shape[2] == 0:
        return None
    pairs = zip(counts[1].T, counts[2].T, strict=True)  # accepted, reached
    return PositionRates(
        *(list(map(as_counted, own)) for own in counts.sum(axis=1)),
        conditional=[estimate(Ratio(*pair), resamples) for pair in pairs],
    )


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
