"""The counts of rounds that were decoded, as a replay has them: what costs go by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafttrain.decoding.types import Output
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.metrics import accepted_tokens
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts, most_drafted, times_judged


@dataclass(frozen=True)
class Drafting:
    """How a pair drafts, as far as counts go by it."""

    block: bool
    """As `Trace.block`."""
    lag: int
    """As `Trace.lag`."""
    ends: frozenset[int]
    """Tokens after which the drafter stops."""


def count_chain(
    output: Output, before: int, limit: Array, candidate: Candidate, drafting: Drafting
) -> PolicyCounts:
    """The counts of one output that was decoded under a stop policy, all [1, 1].

    before, limit [L]: as of a `Trace` of that output.
    """
    drafted = np.array([len(played.drafted) for played in output.rounds])
    emitted = np.array([len(played.emitted) for played in output.rounds])
    place = np.cumsum(emitted) - emitted
    longest = limit[place]
    computed = passes = drafted
    if drafting.block:
        computed = np.minimum(longest, most_drafted(candidate))
        passes = (computed > 0).astype(np.int64)
    else:
        ended = [not drafting.ends.isdisjoint(played.drafted[-1:]) for played in output.rounds]
        longest = np.where(ended, drafted, longest)
    judged = times_judged(candidate, drafted, longest, drafting.block, drafting.lag)
    front = before + place

    def total(fact: Array | int) -> Array:
        return np.array([[float(np.sum(fact))]])

    return PolicyCounts(
        tokens=total(emitted),
        rounds=total(len(drafted)),
        drafted=total(drafted),
        accepted=total(sum(map(accepted_tokens, output.rounds))),
        passes=total(passes),
        computed=total(computed),
        judged=total(judged),
        by_computed=np.bincount(computed).astype(np.float64)[None, None],
        by_rows=np.bincount(drafted + 1).astype(np.float64)[None, None],
        history=total(front),
        drafter_history=total(passes * front),
        sequences=total(1),
        drafting=np.zeros((1, 1, 1)),
    )
