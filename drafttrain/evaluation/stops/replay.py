"""Replay a trace under stop policies: the rounds that decoding would have played, without models.

A round that starts at position p drafts n(p) tokens, as many as its policy says; of them the first
min(n, run(p)) are accepted; it emits one token more, up to the end of the output; the next round
starts there. Policies decide from the states and rows of the tokens drafted (see `DraftState`):
from the rows of tokens 1..d before token d + 1, and their states except, where these have a lag,
the last; or from slots 1..d+1 of a block. Those that learn as they go are played round by round, in
the order of the output, each output and toss anew, as decoding plays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

import numpy as np
import torch

from drafttrain.config.stops import STOPS
from drafttrain.decoding.online_stops import RowFacts
from drafttrain.decoding.roles import RoundFacts
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.metrics import Counts
from drafttrain.evaluation.stops.trace import Trace
from drafttrain.models.acceptance_head import AcceptanceHead

Kind = Literal[
    "fixed", "entropy", "cumulative", "logistic", "bandit", "head", "oracle", "tree", "cascade"
]
VerifierOfChains = Literal["rejection", "block"]
OF_ROWS = ("entropy", "cumulative", "logistic", "bandit")
"""Policies that go by the drafter's rows."""


@dataclass(frozen=True)
class Candidate:
    """A stop policy to replay."""

    kind: Kind
    value: float = 0.0
    """What the policy goes by (`StopKind.varied`)."""
    head: str | None = None
    max_draft: int = 20
    """Most tokens of a round; the oracle has no cap."""
    verifier: VerifierOfChains = "rejection"
    """What judges the drafts, where tokens are sampled."""

    @property
    def name(self) -> str:
        """As the policy is called in reports, the head before it, a rule of its own behind."""
        return self.policy if self.verifier == "rejection" else f"{self.policy} {self.verifier}"

    @property
    def policy(self) -> str:
        """Its name without the rule."""
        if self.kind == "fixed":
            return f"k={self.value:g}"
        if self.kind == "oracle":
            return "oracle"
        policy = f"{self.kind}({self.value:g})"
        return policy if self.head is None else f"{self.head} {policy}"


@dataclass(frozen=True)
class PolicyCounts:
    """Sums over the rounds of each prompt and policy, all [P, C]; over all tosses of the coins."""

    tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    passes: Array
    computed: Array
    """Tokens or slots that the drafter computed: of a block also those behind the stop."""
    judged: Array
    """How often the policy worked something out: for each state or row, or once for a block."""
    by_computed: Array
    """[P, C, K + 1] rounds by the tokens or slots computed."""
    by_rows: Array
    """[P, C, K + 2] rounds by the rows that the target judged, one more than drafted tokens."""
    history: Array
    """Tokens in front of the drafts."""
    drafter_history: Array
    """Tokens in front of the drafter's calls."""
    sequences: Array
    """Outputs played: a toss of the coins each."""
    drafting: Array
    """[P, C, F] what drafting is priced by where rounds were played, not replayed from a trace
    (`played.counts.DRAFTING`)."""

    def of(self, candidate: int) -> Counts:
        """The counts of one policy, as those of decoding."""
        names = ("tokens", "rounds", "drafted", "accepted", "passes")
        return Counts(**{name: getattr(self, name)[:, candidate] for name in names})

    @staticmethod
    def stack(prompts: Sequence[PolicyCounts]) -> PolicyCounts:
        """One for all prompts, in order."""
        return _joined(prompts, axis=0)

    @staticmethod
    def beside(parts: Sequence[PolicyCounts], places: Sequence[Sequence[int]]) -> PolicyCounts:
        """One for policies that were replayed apart; places: where those of each part belong."""
        joined = _joined(parts, axis=1)
        order = np.argsort(np.concatenate(places))
        return PolicyCounts(**{name: fact[:, order] for name, fact in vars(joined).items()})

    def first(self, prompts: int) -> PolicyCounts:
        """Of the first prompts alone."""
        return PolicyCounts(**{name: fact[:prompts] for name, fact in vars(self).items()})


def _joined(parts: Sequence[PolicyCounts], axis: int) -> PolicyCounts:
    """Facts of several, those by a count as long as the longest."""
    facts = {}
    for name in PolicyCounts.__dataclass_fields__:
        own = [getattr(part, name) for part in parts]
        if own[0].ndim == 3:
            most = max(fact.shape[2] for fact in own)
            own = [np.pad(fact, ((0, 0), (0, 0), (0, most - fact.shape[2]))) for fact in own]
        facts[name] = np.concatenate(own, axis=axis)
    return PolicyCounts(**facts)


@torch.inference_mode()
def predicted_acceptance(trace: Trace, heads: dict[str, AcceptanceHead]) -> dict[str, Array]:
    """What each head says of every state of the pool, [M]; each head runs once."""
    if len(trace.states) == 0:
        return {name: np.zeros(0) for name in heads}
    return {
        name: head.acceptance(trace.states.to(head.device)).double().cpu().numpy()
        for name, head in heads.items()
    }


def replay(
    trace: Trace, acceptance: dict[str, Array], candidates: Sequence[Candidate]
) -> PolicyCounts:
    """Counts of one prompt under every policy, all [1, C].

    Raises ValueError for a policy that may draft more than the trace was logged for.
    """
    lengths = draft_lengths(trace, acceptance, candidates)
    rounds = play(trace, lengths)
    judged = np.stack(
        [
            times_judged(candidate, own, trace.longest, trace.block, trace.lag)
            for candidate, own in zip(candidates, lengths, strict=True)
        ]
    )

    def total(fact: Array) -> Array:
        return np.where(rounds, fact, 0).sum(axis=(1, 2), dtype=np.float64)[None]

    emitted, accepted = emit(trace, lengths)
    computed = lengths
    if trace.block:  # as many slots as the policy may draft, whatever it drafts of them
        most = np.array(
            [trace.depth if c.kind == "oracle" else most_drafted(c) for c in candidates]
        )
        computed = np.minimum(trace.longest, most[:, None, None])
    passes = (computed > 0).astype(np.int64) if trace.block else lengths
    front = trace.before + np.arange(trace.tokens)
    return PolicyCounts(
        tokens=total(emitted),
        rounds=total(np.ones_like(lengths)),
        drafted=total(lengths),
        accepted=total(accepted),
        passes=total(passes),
        computed=total(computed),
        judged=total(judged),
        by_computed=_by_count(computed, rounds),
        by_rows=_by_count(lengths + 1, rounds),
        history=total(np.broadcast_to(front, lengths.shape)),
        drafter_history=total(passes * front),
        sequences=total(np.broadcast_to(np.arange(trace.tokens) == 0, lengths.shape)),
        drafting=np.zeros((1, len(lengths), 1)),
    )


def _by_count(counts: Array, rounds: Array) -> Array:
    """How many of the rounds that were played have each count. [C, R, L] -> [1, C, K + 1]."""
    most = int(counts.max(initial=0)) + 1
    played = [
        np.bincount(own[there], minlength=most) for own, there in zip(counts, rounds, strict=True)
    ]
    return np.stack(played).astype(np.float64)[None]


def times_judged(
    candidate: Candidate, lengths: Array, longest: Array, block: bool, lag: int
) -> Array:
    """How often a policy works something out in rounds that draft so many tokens.

    longest: of each as if no policy had stopped it. block, lag: as of `Trace`. Shapes: any, the
    same.
    """
    if candidate.kind not in ("head", *OF_ROWS):
        return np.zeros_like(lengths)
    if not block:
        lag = lag if candidate.kind == "head" else 0
        most = np.minimum(longest, candidate.max_draft)  # there it stops without being asked
        asked = np.where(lengths < most, lengths, lengths - 1)
        return np.maximum(asked - lag, 0)
    if candidate.kind == "head":  # all slots at once
        return (longest > 0).astype(lengths.dtype)
    return np.minimum(lengths + 1, candidate.max_draft)


def draft_lengths(
    trace: Trace, acceptance: dict[str, Array], candidates: Sequence[Candidate]
) -> Array:
    """Tokens that each policy drafts in a round from each position. [C, R, L]."""
    too_long = [c for c in candidates if c.kind != "oracle" and most_drafted(c) > trace.depth]
    if too_long:
        name, most = too_long[0].name, most_drafted(too_long[0])
        raise ValueError(
            f"policy {name} may draft {most} tokens, but the trace was logged for {trace.depth}; "
            f"log it with a depth of {most}"
        )
    survival = {
        name: np.cumprod(np.append(probs, 1.0)[trace.index], axis=-1)
        for name, probs in acceptance.items()
    }
    entropies = np.append(trace.rows[:, 0], -np.inf)[trace.index]
    highest = np.maximum.accumulate(entropies, axis=-1)
    likely = np.cumprod(np.append(trace.rows[:, 1], 1.0)[trace.index], axis=-1)
    lengths = np.empty((len(candidates), *trace.run.shape), dtype=np.int64)
    for i, candidate in enumerate(candidates):
        lengths[i] = _lengths(trace, candidate, survival, highest, likely)
    return lengths


def _lengths(
    trace: Trace, candidate: Candidate, survival: dict[str, Array], highest: Array, likely: Array
) -> Array:
    """[R, L]; survival, highest and likely are monotone along the draft, so counting finds the
    stop."""
    if candidate.kind in STOPS and STOPS[candidate.kind].learns:
        return learned_lengths(trace, candidate)
    if candidate.kind == "oracle":
        return np.minimum(trace.run, trace.limit)
    if candidate.kind == "fixed":
        return np.minimum(int(candidate.value), trace.longest)
    free = 0 if trace.block else 1  # a causal drafter knows a row only by drafting from it
    if candidate.kind == "entropy":
        passed = (highest <= candidate.value).sum(axis=-1)
    elif candidate.kind == "cumulative":
        passed = (likely >= candidate.value).sum(axis=-1)
    else:
        passed = (1.0 - survival[candidate.head] <= candidate.value).sum(axis=-1)
        free += 0 if trace.block else trace.lag
    return np.minimum(np.minimum(passed + free, candidate.max_draft), trace.longest)


def learned_lengths(trace: Trace, candidate: Candidate) -> Array:
    """What a policy that learns drafts in the rounds that it plays; 0 elsewhere. [R, L]."""
    lengths = np.zeros_like(trace.run, dtype=np.int64)
    for toss, run in enumerate(trace.run):
        stop, at = resolve_name(STOPS[candidate.kind].function)(), 0
        while at < trace.tokens:
            drafted = _drafted(trace, candidate, stop, toss, at)
            accepted = min(drafted, int(run[at]))
            stop.learn(RoundFacts(drafted, accepted, candidate.max_draft), candidate.value)
            lengths[toss, at] = drafted
            at += accepted + 1
    return lengths


def _drafted(trace: Trace, candidate: Candidate, stop: Any, toss: int, at: int) -> int:
    """Tokens of a round from a position: the policy is asked before each of them."""
    longest = min(candidate.max_draft, int(trace.longest[toss, at]))
    rows = [RowFacts(*row) for row in trace.rows[trace.index[toss, at, :longest]].tolist()]
    for depth in range(longest):
        if not stop.goes_on(rows[: depth + trace.block], candidate.value):
            return depth
    return longest


def emit(trace: Trace, lengths: Array) -> tuple[Array, Array]:
    """Tokens emitted by a round from each position, and the drafted ones among them. [C, R, L]."""
    left = trace.tokens - np.arange(trace.tokens)
    accepted = np.minimum(lengths, trace.run)
    emitted = np.minimum(accepted + 1, left)
    return emitted, np.minimum(accepted, emitted)


def play(trace: Trace, lengths: Array) -> Array:
    """Whether a round starts at each position: the walk of every policy and toss. [C, R, L]."""
    emitted, _ = emit(trace, lengths)
    starts = np.zeros(lengths.shape, dtype=bool)
    policy, toss = np.indices(lengths.shape[:2])
    policy, toss = policy.ravel(), toss.ravel()
    at = np.zeros(len(policy), dtype=np.int64)
    while len(at) > 0:
        starts[policy, toss, at] = True
        at = at + emitted[policy, toss, at]
        going = at < trace.tokens
        policy, toss, at = policy[going], toss[going], at[going]
    return starts


def most_drafted(candidate: Candidate) -> int:
    """Most tokens of a round."""
    return int(candidate.value) if candidate.kind == "fixed" else candidate.max_draft
