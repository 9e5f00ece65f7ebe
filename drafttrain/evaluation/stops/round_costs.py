"""What a round costs on this machine, as functions of its rows, its history and the batch size.

Every round that decoding plays has its own clocks: seconds of drafting, and of the target's call
with the verifier's decision. From rounds of several draft lengths, at one batch size, two functions
are fitted to them: drafting by what the drafter computes, judging by the rows that the target is
given; both by the tokens in front, which attention reads again. Any round's seconds follow from its
counts then, whoever drafted it and whatever stopped it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from drafttrain.decoding.types import Output
from drafttrain.evaluation.runner import Decoded
from drafttrain.evaluation.stops.waves import beside_rounds

Array = np.ndarray
MOST_KNOTS = 8
FEWEST = 5
"""Rounds of a count that make it a knot."""
FAR = 6.0
"""Deviations (of the median deviation) from which on a round was disturbed and is left out."""


@dataclass(frozen=True)
class TimedRounds:
    """Rounds that were timed at one batch size, all [N]; shared calls are shared out."""

    computed: Array
    """Tokens or slots that the drafter computed."""
    rows: Array
    """Rows that the target judged: one more than was drafted."""
    history: Array
    """Tokens in front of the draft."""
    draft_seconds: Array
    target_seconds: Array


@dataclass(frozen=True)
class Curve:
    """Seconds by a count and by the tokens in front of it.

    base + sum of slope times the part of the count in each segment + per_history times what reads
    the history. It never falls: more rows take no less time.
    """

    base: float
    knots: tuple[float, ...]
    """Where segments begin; the last one has no end."""
    slopes: tuple[float, ...]
    """Seconds a row in each segment."""
    per_history: float = 0.0
    """Seconds a token in front, of each call that reads it."""

    def at(self, count: Array | float) -> Array:
        """Seconds of so many rows with nothing in front. Any shape."""
        segments = _segments(np.asarray(count, dtype=np.float64), self.knots)
        parts = (slope * part for slope, part in zip(self.slopes, segments, strict=True))
        return np.maximum(self.base + sum(parts), 0.0)

    def total(self, by_count: Array, reads: Array, others: int = 0) -> Array:
        """Seconds of many rounds; those of count 0 made no call.

        by_count [..., K + 1]: how many have each count; reads [...]: tokens in front, summed over
        the calls that read them. others: sequences decoded beside each. They share its calls, which
        last as long as the longest of them needs; their counts are as those of all these rounds.
        """
        each = np.concatenate(([0.0], self.at(np.arange(1, by_count.shape[-1]))))
        if others > 0:
            each = _of_the_longest(each, by_count.reshape(-1, len(each)).sum(axis=0), others)
        return by_count @ each + self.per_history * reads


@dataclass(frozen=True)
class RoundCosts:
    """A round of one sequence at one batch size."""

    batch_size: int
    draft: Curve
    """By tokens or slots computed; a call of the drafter a token reads the history each time."""
    target: Curve
    """By rows."""
    constant: float
    """Seconds a sequence beside its rounds' curves: encoding, the prompt's own pass."""
    plain_tokens_per_second: float
    """By these functions, as those of every candidate: rounds that were disturbed are in none."""
    error: float
    """Median over the timed sequences of |predicted - measured| / measured seconds."""


def _of_the_longest(each: Array, often: Array, others: int) -> Array:
    """What is expected of a round by its own count, where the longest of it and others counts.

    Shapes: each [K + 1] by count; often [K + 1] how many rounds have it -> [K + 1].
    """
    none_longer = (np.cumsum(often) / often.sum()) ** others
    longest = each * np.diff(none_longer, prepend=0.0)
    behind = longest[::-1].cumsum()[::-1] - longest
    return each * none_longer + behind


def fit_curve(count: Array, reads: Array, seconds: Array) -> Curve:
    """The curve through timed rounds, by least squares that no slope below 0 enters.

    reads [N]: tokens in front, times the calls that read them.
    """
    knots = _choose_knots(count)
    columns = [np.ones_like(seconds), *_segments(count, knots), reads]
    base, *slopes, history = fit_without_disturbed(np.stack(columns, axis=1), seconds).tolist()
    return Curve(base, knots, tuple(slopes), history)


def fit_without_disturbed(facts: Array, seconds: Array) -> Array:
    """Seconds of each fact, none below 0, by least squares over the rounds that were not disturbed.

    Disturbed ones are found from a first fit and left out of the second. Shapes: facts [N, F],
    seconds [N] -> [F].
    """
    largest = np.maximum(facts.max(axis=0), 1.0)
    kept = np.ones(len(seconds), dtype=bool)
    for _ in range(2):
        solution = nnls(facts[kept] / largest, seconds[kept])[0] / largest
        missed = np.abs(facts @ solution - seconds)
        kept = missed <= FAR * max(float(np.median(missed)), 1e-12)
    return solution


def fit_rounds(timed: TimedRounds, reads_each: bool) -> tuple[Curve, Curve]:
    """Curves of drafting and of judging. reads_each: whether the drafter's every token is a call.

    Raises ValueError where no round drafted anything.
    """
    drafted = timed.computed > 0
    if not drafted.any():
        raise ValueError("no timed round drafted anything; give longer outputs (max_new_tokens)")
    reads = timed.history * (timed.computed if reads_each else 1.0)
    draft = fit_curve(timed.computed[drafted], reads[drafted], timed.draft_seconds[drafted])
    return draft, fit_curve(timed.rows, timed.history, timed.target_seconds)


def _choose_knots(count: Array) -> tuple[float, ...]:
    """Counts that enough rounds have; the segments begin there."""
    values, often = np.unique(count, return_counts=True)
    common = values[often >= min(FEWEST, often.max())]
    if len(common) > MOST_KNOTS:
        common = common[np.linspace(0, len(common) - 1, MOST_KNOTS).round().astype(int)]
    return tuple(map(float, common[:-1] if len(common) > 1 else common))


def _segments(count: Array, knots: Sequence[float]) -> list[Array]:
    """The part of a count that lies in each segment; the first one begins at its knot or below."""
    ends = [*knots[1:], np.inf]
    return [
        np.clip(count, knot, end) - knot if place else np.minimum(count, end) - knot
        for place, (knot, end) in enumerate(zip(knots, ends, strict=True))
    ]


def round_costs(
    runs: Sequence[Decoded],
    before: Sequence[int],
    batch_size: int,
    reads_each: bool,
    smaller: Mapping[int, RoundCosts] | None = None,
    waves: Sequence[Sequence[int]] | None = None,
) -> RoundCosts:
    """The functions of one batch size, from plain decoding and methods of fixed lengths.

    before: tokens in front of each prompt's output. reads_each: whether a drafted token is a call.
    smaller: the functions of smaller batches, which a wave ends with; waves: the prompts of each
    (default: one each).
    """
    timed = timed_rounds(runs, before, batch_size)
    draft, target = fit_rounds(timed, reads_each)
    curves = {size: (costs.draft, costs.target) for size, costs in (smaller or {}).items()}
    curves[batch_size] = draft, target
    found = []
    for run in runs:
        facts = [rounds_of(*one) for one in zip(run.outputs, before, strict=True)]
        shares = {
            size: np.array([_seconds(own, *both, reads_each) for own in facts])
            for size, both in curves.items()
        }
        rounds = np.array([len(own.rows) for own in facts])
        found.append((run.cost_seconds, shares, rounds))
    constant, error = beside_rounds(found, batch_size, waves)
    plain, of_plain = runs[0].outputs, float(found[0][1][batch_size].sum())
    tokens = sum(len(output.tokens) for output in plain)
    speed = tokens / (of_plain + constant * len(plain))
    return RoundCosts(batch_size, draft, target, constant, speed, error)


def _seconds(facts: TimedRounds, draft: Curve, target: Curve, reads_each: bool) -> float:
    """What the rounds of one output take by these functions."""
    reads = facts.history * (facts.computed if reads_each else facts.computed > 0)
    known = draft.total(np.bincount(facts.computed), reads.sum())
    return float(known + target.total(np.bincount(facts.rows), facts.history.sum()))


def timed_rounds(runs: Sequence[Decoded], before: Sequence[int], batch_size: int) -> TimedRounds:
    """The rounds that a full batch shared, but the first of each sequence, whose call also reads
    the prompt; where batches were never full, all but the first."""
    found = [
        (facts, np.array([round.shared_by for round in output.rounds]))
        for run in runs
        for output, front in zip(run.outputs, before, strict=True)
        for facts in [rounds_of(output, front)]
    ]
    full = max(int(shared[1:].max(initial=1)) for _, shared in found)
    least = min(batch_size, full)
    kept = [(np.arange(len(shared)) > 0) & (shared >= least) for _, shared in found]
    names = TimedRounds.__dataclass_fields__
    return TimedRounds(
        **{
            name: np.concatenate(
                [getattr(facts, name)[own] for (facts, _), own in zip(found, kept, strict=True)]
            )
            for name in names
        }
    )


def rounds_of(output: Output, before: int) -> TimedRounds:
    """The rounds of one output of a fixed draft length, in order."""
    drafted = np.array([len(round.drafted) for round in output.rounds])
    emitted = np.array([len(round.emitted) for round in output.rounds])
    return TimedRounds(
        computed=drafted,
        rows=drafted + 1,
        history=before + np.cumsum(emitted) - emitted,
        draft_seconds=np.array([round.draft_seconds for round in output.rounds]),
        target_seconds=np.array([round.target_seconds for round in output.rounds]),
    )
