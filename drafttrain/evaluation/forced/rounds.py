"""The rounds that would be played along a known output, in expectation over the coins.

A round at position s drafts up to k tokens for s, s + 1, ...; with probability coin(s, 0) ...
coin(s, d - 1) (1 - coin(s, d)) d of them are accepted, one token more is emitted, and the next
round starts there. Given the output the coins are independent (see `stops/trace.py`), so the
expectation is exact: nothing is tossed. At temperature 0 there is no randomness at all. Where the
outputs are samples of the target it is the conditional expectation, given the output, of what
decoding counts: sums of it over outputs have the expectation of decoding's own sums, and a smaller
variance. Ratios of such sums are consistent, as decoding's are.

Our own rounds start at the first token. Engines take that from the pass that reads the prompt,
without a draft; their rounds start behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafttrain.evaluation.bootstrap import Array


@dataclass(frozen=True)
class Expected:
    """Sums over the rounds of one output, or of several, as vLLM counts them."""

    num_tokens: int
    """Tokens that the rounds emit."""
    num_steps: float
    """Target calls, with a draft or without one."""
    num_drafts: float
    """Those that verified a draft."""
    num_asked: float
    """Those before which a draft was asked for: there was room for one."""
    num_accepted_tokens_per_pos: Array
    """[k]."""
    num_drafted_per_pos: Array | None
    """[k] drafts that have this position. None where a stop may end drafts behind wrong tokens,
    which the output does not show."""
    num_reached_per_pos: Array
    """[k] those of them that were right up to it, where a token was emitted at it."""

    @property
    def num_accepted_tokens(self) -> float:
        return float(self.num_accepted_tokens_per_pos.sum())

    @property
    def num_draft_tokens(self) -> float | None:
        drafted = self.num_drafted_per_pos
        return None if drafted is None else float(drafted.sum())


def expect_rounds(
    coins: Array,
    limit: Array,
    k: int,
    confidence: Array | None = None,
    p_min: float = 0.0,
    first: int = 1,
    ends: Array | None = None,
) -> Expected:
    """Counts of the rounds along one output that drafts k tokens a round.

    coins: of each token in any round [L], or of each place of each round [L, k], below 0 where a
    draft has no such place. limit [L]: most tokens that a draft from each position may have. first:
    where the first round starts. With p_min, a draft ends before the first token of less confidence
    [L], as llama.cpp's does; it may be empty, and a target call is then made without one. ends [L]:
    tokens that end a draft; what a draft has behind wrong tokens is taken to hold none.
    """
    length = len(coins)
    by_round = coins if coins.ndim == 2 else _windows(coins, k)
    stops_at = _next_end(np.zeros(length, dtype=bool) if ends is None else ends)
    starts = np.zeros(length + 1)
    starts[first : first + 1] = 1.0
    accepted, drafted, got = np.zeros(k), np.zeros(k), np.zeros(k)
    steps, drafts, asked = 0.0, 0.0, 0.0
    stops = p_min > 0.0 and confidence is not None
    for start in range(first, length):
        share = starts[start]
        if share == 0.0:
            continue
        steps += share
        most = min(k, int(limit[start]))
        asked += share * (most > 0)
        most = _first(by_round[start, :most] < 0.0, most)
        seen = min(most, length - start)
        if stops:
            low = _first(confidence[start : start + seen] < p_min, seen)
            most, seen = (low, low) if low < seen else (most, seen)
        if most == 0:
            starts[start + 1] += share
            continue
        ended = stops_at[start] - start + 1  # tokens up to one that ends the draft
        seen = min(seen, ended)
        drafts += share
        reached = np.cumprod(np.append(1.0, by_round[start, :seen]))
        drafted[:most] += share
        if ended <= most:
            drafted[seen:most] -= share * reached[-1]
        accepted[:seen] += share * reached[1:]
        got[:seen] += share * reached[:-1]
        falls = reached - np.append(reached[1:], 0.0)
        places = np.minimum(start + 1 + np.arange(seen + 1), length)
        np.add.at(starts, places, share * falls)
    emitted = max(length - first, 0)
    return Expected(emitted, steps, drafts, asked, accepted, None if stops else drafted, got)


def _windows(coins: Array, k: int) -> Array:
    """Row s has coins s, s + 1, ...; 0 behind the last. [L] -> [L, k]."""
    padded = np.append(coins, np.zeros(k))
    return padded[np.arange(len(coins))[:, None] + np.arange(k)]


def _first(found: Array, otherwise: int) -> int:
    """Place of the first that is true; otherwise where none is."""
    return int(found.argmax()) if found.any() else otherwise


def _next_end(ends: Array) -> Array:
    """Place of the next true one from each on, far away where there is none. [L] -> [L]."""
    far = 2 * len(ends) + 1_000_000
    places = np.where(ends, np.arange(len(ends)), far)
    return np.minimum.accumulate(places[::-1])[::-1]
