"""Cascades of drafters (CS Drafting, Chen et al. 2024): vertical and horizontal.

Vertical: a smaller drafter speeds up a larger one, which reviews its tokens. Leniency lets the
reviewer accept more tokens than its own distribution would. Horizontal: larger drafters draft the
first tokens of a round, whose acceptance matters most, and smaller ones the later tokens. Both are
drafters, so they nest. Each draft token comes with the distribution that it was drawn from, so
verification by the target stays exact. Which level drafts, and how many tokens, depends on counts
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from drafttrain.config.kinds import KINDS, DrawKind, Evidence
from drafttrain.decoding.batching import BatchedCall, BatchedSteps, arg_max_of_each, as_steps
from drafttrain.decoding.drafters.causal import DrafterSequence
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter, DraftSession, Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import Calls, DraftState, Proposal, Sampling, Source
from drafttrain.decoding.verifiers import acceptance_probability, draft_rows, residual


@dataclass(frozen=True)
class Level:
    """One drafter of a cascade; its calls are counted under its name."""

    name: str
    drafter: Drafter
    count: int = 0
    """Number of tokens that it contributes to a round of an `InTurnDrafter`."""

    @property
    def reviewer(self) -> CachedModel | None:
        """The model that reviews other drafters' tokens, if the drafter is a language model."""
        kind = KINDS.get(self.drafter.name)
        return self.drafter.model if kind is not None and kind.is_language_model else None


class ReviewedSession:
    """One sequence: the reviewer's KV cache and a session of the inner drafter."""

    def __init__(
        self, drafter: ReviewedDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.drafter, self.sampling, self.randomness = drafter, sampling, randomness
        self.sequence = DrafterSequence(drafter.reviewer, source)
        self.inner = drafter.inner.open(source, sampling, randomness)

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        longest = self.sequence.longest(tokens, stop.longest)
        parts, length = [], len(tokens)
        while (count := len(tokens) - length) < longest and stop.should_draft(DraftState(count)):
            limit = min(self.drafter.k, longest - count - 1)  # the reviewer adds one token
            inner = EMPTY
            if limit > 0:
                name = self.drafter.inner.name
                inner = yield from draft_with(self.inner, name, tokens, limit, target_state)
            reviewed = yield from self._review(inner, tokens)
            parts += [replace(EMPTY, passes=inner.passes, calls=inner.calls), reviewed]
            tokens = torch.cat((tokens, reviewed.tokens))
            if int(tokens[-1]) in self.drafter.reviewer.eos_ids:
                break
        return join_chains(parts)

    def _review(self, inner: Proposal, committed: Tensor) -> BatchedSteps[Proposal]:
        """Reviews an inner draft. Returns the accepted tokens and one token of the reviewer."""
        reviewer, state = self.drafter.reviewer, (yield from self.sequence.begin())
        began = perf_counter()
        score = yield BatchedCall(reviewer.score, (state, self.sequence.tokens(committed), inner))
        logits, leniency = score.logits, self.drafter.leniency
        emitted, rows = review(inner, logits, self.sampling, self.randomness, leniency)
        reviewer.keep(state, torch.arange(len(emitted) - 1))
        calls = {self.drafter.reviewer_name: Calls(1, perf_counter() - began)}
        reviewed = Proposal.chain(torch.tensor(emitted), rows, logits=logits.unbind, calls=calls)
        return reviewed.until(reviewer.eos_ids)


class ReviewedDrafter(Drafter):
    """Vertical cascade: a language model drafts by reviewing chains of `k` tokens from `inner`.

    Let r and d be the probabilities of an inner token under the reviewer and the inner drafter, and
    l the leniency. Under sampling the token is accepted with probability min(1, l r / d). In greedy
    decoding it is accepted if it is the reviewer's arg-max, or if r before warping exceeds d / l.
    Drafts without probabilities, such as Max-Gram's, are reviewed with l = 1.
    """

    session = ReviewedSession
    provides: frozenset[Evidence] = frozenset()

    def __init__(
        self,
        reviewer: CachedModel,
        inner: Drafter,
        k: int,
        leniency: float = 1.0,
        name: str = "causal",
    ) -> None:
        self.reviewer, self.inner, self.k, self.leniency = reviewer, inner, k, leniency
        self.reviewer_name = name
        lenient = f",l={leniency:g}" if leniency > 1.0 else ""
        self.name = f"{name}<{inner.name} {k}{lenient}>"
        self.requires = inner.requires

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic" if sampling.greedy else "iid"


class InTurnSession:
    """One session per drafter. Each sees the drafts of earlier drafters as committed tokens."""

    def __init__(
        self, drafter: InTurnDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.drafter = drafter
        drafters = [level.drafter for level in drafter.levels]
        self.sessions = [one.open(source, sampling, randomness) for one in drafters]

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        parts, length = [], len(tokens)
        for level, session in zip(self.drafter.levels, self.sessions, strict=True):
            count = len(tokens) - length
            limit = min(level.count, stop.longest - count)
            if limit <= 0 or not stop.should_draft(DraftState(count)):
                break
            part = yield from draft_with(session, level.name, tokens, limit, target_state)
            part = part.until(self.drafter.ends)
            parts.append(part)
            tokens = torch.cat((tokens, part.tokens))
            if len(part.tokens) > 0 and int(tokens[-1]) in self.drafter.ends:
                break
        return join_chains(parts)


class InTurnDrafter(Drafter):
    """Horizontal cascade: each level appends its number of tokens to the draft so far."""

    session = InTurnSession
    provides: frozenset[Evidence] = frozenset()

    def __init__(
        self, levels: Sequence[Level], name: str | None = None, ends: frozenset[int] = frozenset()
    ) -> None:
        """ends: tokens that end a draft."""
        self.levels = [level for level in levels if level.count > 0]
        self.ends = ends
        self.name = name or " then ".join(f"{one.name} {one.count}" for one in self.levels)
        self.requires = TargetRequirements.union(one.drafter.requires for one in self.levels)

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        draws = {level.drafter.draw_kind(sampling) for level in self.levels}
        return "deterministic" if draws == {"deterministic"} else "iid"


EMPTY = Proposal.empty()


def draft_with(
    session: DraftSession, name: str, tokens: Tensor, limit: int, target_state: TargetState | None
) -> BatchedSteps[Proposal]:
    """Drafts up to `limit` tokens after committed tokens and earlier drafts [T]; counts calls."""
    began = perf_counter()
    steps = as_steps(session.propose(tokens, target_state, FixedLength(limit)))
    part = (yield from steps).on_host()
    calls = {name: Calls(part.passes, perf_counter() - began)}
    return part if part.calls is not None else replace(part, calls=calls)


def join_chains(parts: Sequence[Proposal]) -> Proposal:
    """Joins chains of several drafters, one after the other, into one chain.

    Point masses among drawn tokens get one-hot rows. Passes and calls add up.
    """
    calls: dict[str, Calls] = {}
    for part in parts:
        for name, more in (part.calls or {}).items():
            calls[name] = calls.get(name, Calls(0, 0.0)) + more

    def logits() -> list[Tensor | None]:
        rows: list[Tensor | None] = []
        for part in parts:
            own = [None] * len(part.tokens) if part.logits is None else part.logits()
            rows += own[: len(part.tokens)]
        return rows

    tokens = torch.cat([EMPTY.tokens, *(part.tokens for part in parts)])
    passes = sum(part.passes for part in parts)
    joined = Proposal.chain(tokens, passes=passes, logits=logits, calls=calls)
    drawn = [part.draft_probs for part in parts if part.draft_probs is not None]
    if not drawn:
        return joined
    rows = [draft_rows(part, drawn[0]) for part in parts]
    copied = [part.is_copied for part in parts]
    return replace(joined, draw_kind="iid", draft_probs=torch.cat(rows), copied=torch.cat(copied))


def review(
    inner: Proposal, logits: Tensor, sampling: Sampling, randomness: Randomness, leniency: float
) -> tuple[list[int], Tensor | None]:
    """Accepts a prefix of the inner draft and adds one token.

    Returns the tokens and the distributions that they follow, None in greedy decoding (point
    masses). Let r and d be the distributions of the reviewer and of the inner drafter, and l the
    leniency. Under sampling a reviewed token follows min(d, l r) + (1 - sum min(d, l r))
    Norm[(r - d)+], and the token after a fully accepted draft follows r. Copied tokens, which have
    no distribution, are reviewed with l = 1. Shapes: logits [N + 1, V].
    """
    tokens = inner.tokens.tolist()
    if sampling.greedy:
        [best], accepted = arg_max_of_each([logits]), 0
        for index, token in enumerate(tokens):
            if token != best[index] and not _accepts_leniently(inner, index, logits, leniency):
                break
            accepted += 1
        return [*tokens[:accepted], best[accepted]], None
    probs = warp(logits, sampling)
    at_token = inner.tokens.to(probs.device)
    lenient = probs.new_full((len(tokens), 1), leniency)
    lenient = lenient.masked_fill(inner.is_copied.to(probs.device)[:, None], 1.0)
    draft = draft_rows(inner, probs)
    shared = torch.minimum(draft, lenient * probs[:-1])
    accepted = randomness.accept_run(acceptance_probability(shared, draft, at_token))
    rows = [
        row + (1.0 - row.sum()).clamp_min(0.0) * residual(reviewed, drafted)
        for row, reviewed, drafted in zip(shared[: accepted + 1], probs, draft, strict=False)
    ]
    left = probs[accepted]
    if accepted == len(tokens):
        rows.append(left)
    else:
        left = residual(left, draft[accepted])
    return [*tokens[:accepted], int(randomness.categorical(left[None])[0])], torch.stack(rows)


def _accepts_leniently(inner: Proposal, index: int, logits: Tensor, leniency: float) -> bool:
    """Whether the reviewer's probability of a token, before warping, exceeds the inner drafter's
    divided by the leniency."""
    if leniency == 1.0 or inner.logits is None or inner.logits()[index] is None:
        return False
    token, row = int(inner.tokens[index]), inner.logits()[index]
    return bool(logits[index].softmax(-1)[token] > row.softmax(-1)[token].to(logits) / leniency)


def cascade(
    levels: Sequence[Level],
    increments: Sequence[Sequence[int]],
    leniency: float = 1.0,
    ends: frozenset[int] = frozenset(),
    name: str | None = None,
) -> InTurnDrafter:
    """Builds the cascade of CS Drafting, Algorithm 1.

    levels: drafters from the largest to the smallest, usually Max-Gram. increments[0][i]: tokens
    that level i adds to a round. A language model drafts them by reviewing a cascade of the levels
    after it, whose increments are the rows from 1 on and the columns from i on. It drafts alone if
    these are all zero, as do drafters that cannot review. Row r has one entry for each level except
    the first r. ends: tokens that end a draft. Raises ValueError for a matrix of another shape.
    """
    check_increments(increments, [level.name for level in levels])
    drafting = []
    for i, (level, count) in enumerate(zip(levels, increments[0], strict=True)):
        rest, drafter = levels[i + 1 :], level.drafter
        below = [row[i:] for row in increments[1 : len(levels) - i]]
        if level.reviewer is not None and rest and any(below[0]):
            inner = cascade(rest, below, leniency, ends)
            drafter = ReviewedDrafter(level.reviewer, inner, sum(below[0]), leniency, level.name)
        drafting.append(Level(level.name, drafter, count))
    return InTurnDrafter(drafting, name, ends)


def check_increments(increments: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Raises ValueError if the matrix is not triangular over the levels, or its first row is 0."""
    shape = [len(names) - row for row in range(len(names))]
    if [len(row) for row in increments] != shape or not any(increments[0]):
        raise ValueError(
            f"increments {show_increments(increments)!r} of a cascade of {', '.join(names)} must "
            f"have {len(names)} rows, of {', '.join(map(str, shape))} numbers: a row for each "
            "depth of reviews, a number for each level from that depth on; the first row must add "
            "up to 1 or more"
        )


def show_increments(increments: Sequence[Sequence[int]]) -> str:
    """Formats the matrix as on the command line: 5,3,2/4,10/10."""
    return "/".join(",".join(map(str, row)) for row in increments)
