"""The rounds that an engine would play along a known output, in expectation over the coins.

Engines take the first token of an answer from the pass that reads the prompt, without a draft;
rounds start behind it. A round at position s drafts up to k tokens for s, s + 1, ...; with
probability coin(s) coin(s+1) ... coin(s+d-1) (1 - coin(s+d)) d of them are accepted, one token more
is emitted, and the next round starts there. Given the output the coins are independent (see
`stops/trace.py`), so the expectation is exact: nothing is tossed. It is that of engines where the
outputs are samples of the target, and at temperature 0 there is no randomness at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafttrain.evaluation.bootstrap import Array


@dataclass(frozen=True)
class Expected:
    """Sums over the rounds of one output, or of several, as vLLM counts them."""

    num_steps: float
    """Target calls, with a draft or without one."""
    num_drafts: float
    """Those that verified a draft."""
    num_draft_tokens: float | None
    """None where a stop may end drafts behind wrong tokens, which the output does not show."""
    num_accepted_tokens_per_pos: Array
    """[k]."""

    @property
    def num_accepted_tokens(self) -> float:
        return float(self.num_accepted_tokens_per_pos.sum())


def expect_rounds(
    coins: Array, limit: Array, k: int, confidence: Array | None = None, p_min: float = 0.0
) -> Expected:
    """Counts of the rounds along one output that drafts k tokens a round.

    limit: most tokens that a draft from each position may have. With p_min, a draft ends before the
    first token of less confidence, as llama.cpp's does; it may be empty, and a target call is then
    made without one. Shapes: coins [L], limit [L], confidence [L].
    """
    length = len(coins)
    starts = np.zeros(length + 1)
    starts[1:2] = 1.0
    accepted, steps, drafts, drafted = np.zeros(k), 0.0, 0.0, 0.0
    stops = p_min > 0.0 and confidence is not None
    for start in range(1, length):
        share = starts[start]
        if share == 0.0:
            continue
        steps += share
        most = min(k, int(limit[start]))
        seen = min(most, length - start)
        if stops:
            low = np.flatnonzero(confidence[start : start + seen] < p_min)
            seen = int(low[0]) if len(low) else seen
            most = seen if len(low) else most
        if most == 0:
            starts[start + 1] += share
            continue
        drafts, drafted = drafts + share, drafted + share * most
        reached = np.cumprod(np.append(1.0, coins[start : start + seen]))
        accepted[:seen] += share * reached[1:]
        ended = reached - np.append(reached[1:], 0.0)
        places = np.minimum(start + 1 + np.arange(seen + 1), length)
        np.add.at(starts, places, share * ended)
    return Expected(steps, drafts, None if stops else drafted, accepted)
