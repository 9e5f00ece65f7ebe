"""Traces: one output with everything that any stop policy would see and cost along it.

Exact replay by coupling. Let X be an output of the target. Given X, the law of speculative sampling
is known: a token drafted at position i behind accepted tokens equals X_i and is accepted with
probability min(1, draft_i(X_i) / target_i(X_i)); otherwise the drafted token is a sample of
Norm[(draft_i - target_i)+], it is rejected, X_i takes its place, and the drafter went on from the
wrong token until its policy stopped. (P(drafted and accepted = x) = min(draft, target)(x), and the
token emitted after a rejection does not depend on the one rejected.) Every position of X belongs to
exactly one round, so one coin and one wrong branch a position make a trace on which every policy
plays the rounds that decoding would have played, in law; in greedy decoding there is no randomness,
and they are the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
NOTHING = -1
"""In `Trace.index`: no token can be drafted there, or no policy ever looks at it."""
UNENDED = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Trace:
    """Rounds of one prompt's output, from every position, in R tosses of the coins.

    Positions are those of the output, from 0; a round that starts at p drafts tokens for p, p + 1,
    ...; its d-th drafted token (from 0) is entry index[r, p, d] of the pool.
    """

    tokens: int
    """L, the tokens of the output, EOS included."""
    block: bool
    """Whether one pass drafts a block of slots (the states are then those of slots)."""
    lag: int
    """Tokens drafted behind one before its state is known: 1 where a head reads states of tokens at
    their own positions, else 0."""
    states: Tensor
    """[M, D] the pool: what acceptance heads read."""
    rows: Array
    """[M, 2] `RowFacts` of the row that each token was drawn from."""
    index: Array
    """[R, L, K] int32: pool entry of each drafted token, or NOTHING."""
    run: Array
    """[R, L] int32: tokens accepted before the first rejection, were drafting never stopped."""
    longest: Array
    """[R, L] int32: tokens drafted if no policy stops: the limit, EOS in the draft, K."""
    limit: Array
    """[L] int32: most tokens that a draft from each position may have, were K unlimited: what is
    left to generate less one, and the drafter's own positions."""
    before: int = 0
    """Tokens in front of the output: a prompt, or what a decoder starts from."""

    @property
    def depth(self) -> int:
        """K, the most tokens a policy may draft in a replay."""
        return self.index.shape[2]


@dataclass
class WrongBranch:
    """What the drafter drafts from a rejected token on, in the place of a token of the output."""

    position: int
    most: int
    """Most tokens that could be drafted from here in one round."""
    tokens: list[int]
    """The rejected one first; a final EOS included."""
    rows: list[Sequence[float]]
    """`RowFacts` of the row of each token."""
    ends: frozenset[int]
    """Tokens after which the drafter stops."""
    drawn: Tensor | None = None
    """State of the last token as it was drawn, where states of that kind are logged; else None."""
    states: list[Tensor] = field(default_factory=list)
    """[D] each, of the tokens that others were drafted behind: nothing is asked after the last."""
    start: int | None = None
    """Where the one round begins that comes here; None: all rounds rejected at `position` do."""
    weight: float = 1.0
    """Of the prefix up to the last token, where a verifier weighs prefixes; else 1."""

    @property
    def ended(self) -> bool:
        return self.tokens[-1] in self.ends

    @property
    def goes_on(self) -> bool:
        return len(self.tokens) < self.most and not self.ended

    def feed(self, fed: Tensor, row: Sequence[float], token: int, drawn: Tensor | None) -> None:
        """The last token's state at its own position, the facts of the row after it, the token
        drawn from that row, and that token's state, where `drawn` states are logged."""
        self.states.append(fed if self.drawn is None else self.drawn)
        self.rows.append(row)
        self.tokens.append(token)
        self.drawn = drawn


@dataclass(frozen=True)
class AcceptedPath:
    """The drafter's side of an output that was accepted all along."""

    limit: Array
    """[L] as in `Trace`."""
    ends: Array
    """[L] whether the token at each position is one that a drafter stops after."""
    lag: int
    """As in `Trace`."""
    states: Tensor
    """[L, D] state of each token of the output, were it drafted."""
    rows: Tensor
    """[L, 2] facts of the drafter's row that each token was drawn from."""
    before: int = 0
    """As in `Trace`."""


def join(
    path: AcceptedPath, run: Array, branches: Sequence[Sequence[WrongBranch]], depth: int
) -> Trace:
    """The trace of a drafter that drafts one token a pass.

    run [R, L] as in `Trace`. branches: for each toss, the wrong branch of every position where
    something is rejected, or of every round that ends so (those that draft nothing need none).
    """
    replicates, length = run.shape
    states, rows = [path.states.cpu()], [path.rows.double().cpu().numpy()]
    first = np.full((replicates, length), NOTHING)
    known = np.zeros((replicates, length), dtype=np.int64)
    drawn = np.zeros((replicates, length), dtype=np.int64)
    ended = np.zeros((replicates, length), dtype=bool)
    total = length
    for toss, found in enumerate(branches):
        for branch in found:
            at = branch.position if branch.start is None else branch.start
            place, count = (toss, at), len(branch.states)
            first[place], known[place] = total, count
            drawn[place], ended[place] = len(branch.tokens), branch.ended
            total += count
            if count:
                states.append(torch.stack(branch.states).cpu())
                rows.append(np.array(branch.rows[:count]))
    if not any(branch.start is not None for found in branches for branch in found):
        rejected = np.minimum(np.arange(length) + run, length - 1)
        first, known, drawn, ended = (
            np.take_along_axis(table, rejected, axis=1) for table in (first, known, drawn, ended)
        )
    longest = np.minimum(_until_eos(run, drawn, ended, path.ends), np.minimum(path.limit, depth))
    return Trace(
        tokens=length,
        block=False,
        lag=path.lag,
        states=torch.cat(states),
        rows=np.concatenate(rows),
        index=_pool_entries(run, first, known, depth),
        run=run.astype(np.int32),
        longest=longest.astype(np.int32),
        limit=path.limit.astype(np.int32),
        before=path.before,
    )


def run_lengths(accepted: Array) -> Array:
    """Tokens from each position to the first one at which the coin says no. [R, L]."""
    return first_rejection(accepted) - np.arange(accepted.shape[1])


def first_rejection(accepted: Array) -> Array:
    """First position at or after each one where the coin says no; L where none does. [R, L]."""
    length = accepted.shape[1]
    rejected = np.where(accepted, length, np.arange(length))
    return np.minimum.accumulate(rejected[:, ::-1], axis=1)[:, ::-1]


def _until_eos(run: Array, drawn: Array, ended: Array, ends: Array) -> Array:
    """Tokens from each position to the first EOS in the draft, itself included. [R, L].

    drawn, ended: of the wrong branch that a round from each position comes to.
    """
    length = run.shape[1]
    places = np.arange(length)
    rejected = places + run
    wrong = (rejected < length) & ended
    stops = first_rejection(~ends[None])[0]  # the next position that holds an EOS
    on_path = (stops < length) & (stops < rejected)
    return np.where(on_path, stops - places + 1, np.where(wrong, run + drawn, UNENDED))


def _pool_entries(run: Array, first: Array, known: Array, depth: int) -> Array:
    """Where the d-th token drafted from each position lies in the pool. [R, L, K].

    first, known: of the wrong branch that a round from each position comes to.
    """
    length = run.shape[1]
    rejected = np.arange(length) + run
    depths = np.arange(depth)
    on_path = depths < run[..., None]
    beyond = depths - run[..., None]
    in_branch = (rejected < length)[..., None] & (beyond >= 0) & (beyond < known[..., None])
    entries = np.where(in_branch, first[..., None] + beyond, NOTHING)
    return np.where(on_path, np.arange(length)[:, None] + depths, entries).astype(np.int32)
