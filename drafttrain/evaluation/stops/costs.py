"""The two means of SpecDec++ that a round costs, and the threshold that follows from them.

Rounds are priced by functions of their counts (`round_costs.py`). For comparison with the paper,
and for thresholds that follow from it, there are also the two means of
SpecDec++ Eq. 2.1: T = t_draft N_draft + t_target N_target, fitted by least squares over decoding
runs (its Table 2), here with a constant a prompt for the encoder or the prompt's own pass. Where a
drafter makes one token a pass, N_draft counts passes and drafted tokens alike. A block drafter
makes one pass a round: t_target is then the cost of a round, its pass included, and t_draft that of
a drafted token more. A token more to verify is part of t_draft either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafttrain.decoding.types import Output
from drafttrain.evaluation.metrics import count_rounds, mean_target_seconds


@dataclass(frozen=True)
class Costs:
    """Seconds, fitted and by direct means."""

    t_draft: float
    """A drafted token."""
    t_target: float
    """A target call (with its drafter pass, where one pass drafts a block)."""
    constant: float
    """A prompt, before its first round."""
    r_squared: float | None
    """Share of the variance of the prompts' seconds that the fit explains; None: no fit, the first
    two are of the rounds' own clocks."""
    runs: int
    """Decoding runs fitted: prompts times methods."""
    t_slot: float = 0.0
    """A slot of a block that is computed but not submitted."""
    draft_mean: float | None = None
    """Mean seconds of drafting over drafter passes, from the rounds' own clocks."""
    target_mean: float | None = None
    """Mean seconds of scoring and verifying over target calls."""


def fit_costs(outputs: Sequence[Output], block: bool = False, constant: bool = True) -> Costs:
    """t_draft and t_target from decoded outputs with their seconds and rounds.

    block: whether one pass drafts a block; then what a slot costs is fitted to the rounds' own
    clocks. Where other work on the machine makes one of the two come out below 0, both are of the
    rounds' own clocks instead. Raises ValueError where the runs do not tell them apart.
    """
    counts = count_rounds(outputs)
    seconds = np.array([output.seconds for output in outputs])
    columns = [counts.drafted, counts.rounds]
    if constant:
        columns.append(np.ones(len(seconds)))
    facts = np.stack(columns, axis=1)
    if np.linalg.matrix_rank(facts) < facts.shape[1]:
        raise ValueError(
            f"{len(outputs)} timed runs do not tell t_draft and t_target apart; time more prompts "
            "(timing_prompts) at more than one length (lengths)"
        )
    solution = np.linalg.lstsq(facts, seconds, rcond=None)[0]
    if constant and solution[2] < 0:  # a prompt costs nothing less than nothing
        return fit_costs(outputs, block, constant=False)
    t_draft, t_target = float(solution[0]), float(solution[1])
    before = float(solution[2]) if constant else 0.0
    residual = seconds - facts @ solution
    spread = ((seconds - seconds.mean()) ** 2).sum()
    r_squared = float(1.0 - (residual**2).sum() / spread)
    drafting, passes = float(counts.draft_seconds.sum()), float(counts.passes.sum())
    target_mean = mean_target_seconds(outputs)
    if t_draft <= 0 or t_target <= 0:
        t_draft, t_target = drafting / float(counts.drafted.sum()), target_mean
        before, r_squared = 0.0, None
    return Costs(
        t_draft=t_draft,
        t_target=t_target,
        constant=before,
        r_squared=r_squared,
        runs=len(outputs),
        t_slot=_slot_seconds(outputs) if block else 0.0,
        draft_mean=drafting / passes if passes else None,
        target_mean=target_mean,
    )


def _slot_seconds(outputs: Sequence[Output]) -> float:
    """What one slot more adds to a drafter pass; never less than nothing."""
    rounds = [round for output in outputs for round in output.rounds if round.passes]
    slots = np.array([len(round.drafted) for round in rounds], dtype=np.float64)
    seconds = np.array([round.draft_seconds for round in rounds])
    spread = ((slots - slots.mean()) ** 2).sum()
    if spread == 0.0:
        return 0.0
    return max(0.0, float(((slots - slots.mean()) * seconds).sum() / spread))


def threshold_from_costs(t_draft: float, t_target: float, delta: float = 0.0) -> float:
    """Theorem 3.1: stop when a rejection is at least as likely as (c2 + D) / (c1 + c2 + D).

    c1 = t_draft, c2 = t_target - t_draft. The condition is sufficient, and D depends on the policy
    itself: D = 0 is a starting point for h.
    """
    c1, c2 = t_draft, t_target - t_draft
    return (c2 + delta) / (c1 + c2 + delta)
