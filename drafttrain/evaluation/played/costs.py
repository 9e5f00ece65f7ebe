"""What rounds of trees and cascades cost on this machine, as functions of what they count.

Drafting is a sum over the round's counts (`counts.DRAFTING`), each with seconds of its own, by
least squares without negative seconds; so a prompt's sums are enough to price it. Judging is a
curve by rows and tokens in front, as for chains (`round_costs`), of the method's own rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from drafttrain.evaluation.metrics import count_rounds
from drafttrain.evaluation.played.counts import DRAFTING, PlayedRounds, count_output, rounds_of
from drafttrain.evaluation.runner import Decoded
from drafttrain.evaluation.stops.replay import PolicyCounts
from drafttrain.evaluation.stops.round_costs import Curve, fit_curve, fit_without_disturbed
from drafttrain.evaluation.stops.waves import beside_rounds

Array = np.ndarray


@dataclass(frozen=True)
class MethodCosts:
    """A round of one sequence by methods of one way, at one batch size."""

    way: str
    """cascade, or the kind of tree."""
    batch_size: int
    drafting: dict[str, float]
    """Seconds of each count of a round's drafting."""
    target: Curve
    """By rows."""
    constant: float
    """Seconds a sequence beside its rounds: encoding, the prompt's own pass."""
    error: float
    """Median over the timed sequences of |predicted - measured| / measured seconds."""

    def seconds(self, counts: PolicyCounts, place: int) -> Array:
        """Predicted seconds of each prompt under a method of this way. [P]."""
        each = np.array(list(self.drafting.values()))
        drafting = counts.drafting[:, place, : len(each)] @ each
        judging = self.target.total(counts.by_rows[:, place], counts.history[:, place])
        return drafting + judging + self.constant * counts.sequences[:, place]


def method_costs(
    runs: Sequence[Decoded],
    before: Sequence[int],
    drafters: Sequence[str],
    way: str,
    batch_size: int,
    smaller: Mapping[int, MethodCosts] | None = None,
    waves: Sequence[Sequence[int]] | None = None,
) -> MethodCosts:
    """The functions of one way and batch size, from methods of several sizes.

    before: tokens in front of each prompt's output. drafters: whose calls are counted apart.
    smaller, waves: as in `round_costs` of chains. Raises ValueError where nothing was drafted.
    """
    outputs = [
        (output, front) for run in runs for output, front in zip(run.outputs, before, strict=True)
    ]
    rounds = [rounds_of(output, front, drafters) for output, front in outputs]
    timed = _steady(rounds, batch_size)
    drafting = _fit_drafting(timed, way, drafters)
    target = fit_curve(timed.rows, timed.history, timed.target_seconds)
    without = MethodCosts(way, batch_size, drafting, target, 0.0, 0.0)
    known = {size: replace(costs, constant=0.0) for size, costs in (smaller or {}).items()}
    known[batch_size] = without
    found = []
    for run in runs:
        counts = PolicyCounts.stack(
            [
                count_output(output, front, drafters)
                for output, front in zip(run.outputs, before, strict=True)
            ]
        )
        shares = {size: costs.seconds(counts, 0) for size, costs in known.items()}
        found.append((run.cost_seconds, shares, counts.rounds[:, 0]))
    constant, error = beside_rounds(found, batch_size, waves)
    return MethodCosts(way, batch_size, drafting, target, constant, error)


def _fit_drafting(timed: PlayedRounds, way: str, drafters: Sequence[str]) -> dict[str, float]:
    drafted = timed.drafting[:, 0] > 0
    if not drafted.any():
        raise ValueError(
            f"no timed round of {way!r} drafted anything; give longer outputs (max_new_tokens)"
        )
    facts = timed.drafting[drafted]
    seconds = fit_without_disturbed(facts, timed.draft_seconds[drafted])
    return dict(zip((*DRAFTING, *drafters), seconds.tolist(), strict=True))


def check_asked(names: Sequence[str], runs: Sequence[Decoded]) -> None:
    """Raise ValueError for one of these drafters that was never asked: its cost is not known."""
    calls = count_rounds([output for run in runs for output in run.outputs]).calls
    idle = [name for name in names if name not in calls or not calls[name].any()]
    if idle:
        raise ValueError(
            f"{idle[0]!r} made no call on the timing prompts, so its cost is not known; raise "
            "sampling.max_new_tokens or timing_prompts"
        )


def _steady(rounds: Sequence[PlayedRounds], batch_size: int) -> PlayedRounds:
    """The rounds that a full batch shared, but the first of each sequence, whose call also reads
    the prompt; where batches were never full, those that as many shared as ever did."""
    full = max(int(one.shared_by[1:].max(initial=1)) for one in rounds)
    kept = [
        (np.arange(len(one.rows)) > 0) & (one.shared_by >= min(batch_size, full)) for one in rounds
    ]
    return PlayedRounds(
        **{
            name: np.concatenate(
                [getattr(one, name)[own] for one, own in zip(rounds, kept, strict=True)]
            )
            for name in PlayedRounds.__dataclass_fields__
        }
    )
