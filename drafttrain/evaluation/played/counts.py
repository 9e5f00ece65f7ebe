"""What a method spent on a prompt, from the rounds that it played: the counts that costs go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafttrain.decoding.types import Output
from drafttrain.evaluation.metrics import accepted_tokens
from drafttrain.evaluation.stops.replay import PolicyCounts

Array = np.ndarray
DRAFTING = ("rounds", "passes", "levels", "tokens", "history")
"""What the seconds of a round's drafting are a function of: whether anything was drafted, calls of
the drafter in a row, levels and tokens of the draft, and tokens in front of each call. Behind these
come calls of each drafter, where several draft."""


@dataclass(frozen=True)
class PlayedRounds:
    """The rounds of one output, in order."""

    drafting: Array
    """[N, F], as `DRAFTING`, then calls by drafter."""
    rows: Array
    """[N] rows that the target judged: one more than was drafted."""
    history: Array
    """[N] tokens in front of the draft."""
    emitted: Array
    """[N]."""
    draft_seconds: Array
    target_seconds: Array
    shared_by: Array
    """[N] sequences that shared the calls."""


def rounds_of(output: Output, before: int, drafters: Sequence[str]) -> PlayedRounds:
    """The rounds of an output with so many tokens in front of it."""
    rounds = output.rounds
    emitted = np.array([len(played.emitted) for played in rounds])
    history = before + np.cumsum(emitted) - emitted
    drafting = [
        [
            float(played.passes > 0 or len(played.drafted) > 0),
            played.passes,
            played.levels,
            len(played.drafted),
            played.passes * front,
            *((played.calls or {})[name].count if name in (played.calls or {}) else 0
              for name in drafters),
        ]
        for played, front in zip(rounds, history.tolist(), strict=True)
    ]  # fmt: skip
    return PlayedRounds(
        drafting=np.array(drafting, dtype=np.float64),
        rows=np.array([len(played.drafted) + 1 for played in rounds]),
        history=history,
        emitted=emitted,
        draft_seconds=np.array([played.draft_seconds for played in rounds]),
        target_seconds=np.array([played.target_seconds for played in rounds]),
        shared_by=np.array([played.shared_by for played in rounds]),
    )


def count_output(output: Output, before: int, drafters: Sequence[str] = ()) -> PolicyCounts:
    """The counts of one output, all [1, 1]; before: tokens in front of it."""
    played = rounds_of(output, before, drafters)

    def one(value: float) -> Array:
        return np.array([[float(value)]])

    return PolicyCounts(
        tokens=one(played.emitted.sum()),
        rounds=one(len(played.rows)),
        drafted=one((played.rows - 1).sum()),
        accepted=one(sum(map(accepted_tokens, output.rounds))),
        passes=one(played.drafting[:, DRAFTING.index("passes")].sum()),
        computed=one(0),
        judged=one(0),
        by_computed=np.zeros((1, 1, 1)),
        by_rows=np.bincount(played.rows).astype(np.float64)[None, None],
        history=one(played.history.sum()),
        drafter_history=one(0),
        sequences=one(1),
        drafting=played.drafting.sum(axis=0)[None, None],
    )
