"""Cascades of drafters (CS Drafting, Chen et al. 2024): reviews inside, and quotas in turn.

Vertical: a drafter's own drafting is sped up by a smaller one, whose tokens it reviews; leniency
lets it accept more than its own distribution would. Horizontal: the first tokens of a round come
from a larger drafter, which matters more, the later ones from smaller ones. Both are drafters, so
they nest. Whatever happens inside, each token is handed out with the row it follows in law, and
the target's own review stays exact. Which level drafts, and how much, depends on counts alone.
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
    """One of a cascade's drafters, under a name of its own."""

    name: str
    drafter: Drafter

    @property
    def reviewer(self) -> CachedModel | None:
        """The model that can review other drafters' tokens: a language model's."""
        kind = KINDS.get(self.drafter.name)
        return self.drafter.model if kind is not None and kind.is_language_model else None


class ReviewedDrafter(Drafter):
    """Vertical cascade: a language model drafts by reviewing chains of `k` tokens from `inner`.

    leniency l: an inner token is accepted with min(1, l r / d) under sampling, r and d being the
    reviewer's and the inner drafter's probability; in greedy decoding where it is the reviewer's
    arg-max, or its unwarped r exceeds d / l. Drafts without rows of their own, as Max-Gram's, are
    reviewed with l = 1. Raises ValueError for l below 1 and k below 1.
    """

    provides: frozenset[Evidence] = frozenset()

    def __init__(
        self,
        reviewer: CachedModel,
        inner: Drafter,
        k: int,
        leniency: float = 1.0,
        name: str = "causal",
    ) -> None:
        if not leniency >= 1.0:
            raise ValueError(f"leniency = {leniency} must be 1 (none) or more")
        if k < 1:
            raise ValueError(f"k = {k} tokens for a review must be at least 1")
        self.reviewer, self.inner, self.k, self.leniency = reviewer, inner, k, leniency
        self.of = name
        lenient = f",l={leniency:g}" if leniency > 1.0 else ""
        self.name = f"{name}<{inner.name} {k}{lenient}>"
        self.requires = inner.requires
        self.vocabulary = reviewer.vocabulary

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic" if sampling.greedy else "iid"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> ReviewedSession:
        """Open a session. Raises ValueError for a source longer than a level's positions."""
        return ReviewedSession(self, source, sampling, randomness)


class ReviewedSession:
    """One sequence: the reviewer's cache, and a session of the inner drafter."""

    def __init__(
        self, drafter: ReviewedDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.drafter, self.sampling, self.randomness = drafter, sampling, randomness
        self.sequence = DrafterSequence(drafter.reviewer, source)
        self.inner = drafter.inner.open(source, sampling, randomness)

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        longest = self.sequence.longest(stop.longest, len(self.sequence.tokens(tokens)))
        parts, length = [], len(tokens)
        while (count := len(tokens) - length) < longest and stop.should_draft(DraftState(count)):
            room = min(self.drafter.k, longest - count - 1)  # one token follows what is accepted
            inner = EMPTY
            if room > 0:
                name = self.drafter.inner.name
                inner = yield from draft_with(self.inner, name, tokens, room, target_state)
            parts.append(replace(EMPTY, passes=inner.passes, calls=inner.calls))
            parts.append((yield from self._review(inner, tokens)))
            tokens = torch.cat((tokens, parts[-1].tokens))
            if int(tokens[-1]) in self.drafter.reviewer.eos_ids:
                break
        return join_chains(parts)

    def _review(self, inner: Proposal, committed: Tensor) -> BatchedSteps[Proposal]:
        """What the reviewer makes of an inner draft."""
        reviewer, state = self.drafter.reviewer, (yield from self.sequence.begin())
        began = perf_counter()
        score = yield BatchedCall(
            reviewer.score_all, (state, self.sequence.tokens(committed), inner)
        )
        emitted, rows = review(
            inner, score.logits, self.sampling, self.randomness, self.drafter.leniency
        )
        reviewer.keep(state, torch.arange(len(emitted) - 1))
        calls = {self.drafter.of: Calls(1, perf_counter() - began)}
        logits = score.logits.unbind
        found = Proposal.chain(torch.tensor(emitted), rows, logits=logits, calls=calls)
        return found.until(reviewer.eos_ids)


@dataclass
class Quota:
    """So many tokens of a round come from this drafter."""

    drafter: Drafter
    count: int
    name: str | None = None
    """What its calls are counted under. Default: the drafter's name."""


class InTurnDrafter(Drafter):
    """Horizontal cascade: each drafter adds its quota to the draft of those before it.

    Raises ValueError for negative quotas, and where all are zero.
    """

    provides: frozenset[Evidence] = frozenset()

    def __init__(
        self,
        quotas: Sequence[Quota],
        name: str | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """ends: tokens behind which nothing is drafted."""
        if any(quota.count < 0 for quota in quotas) or not any(q.count for q in quotas):
            raise ValueError(
                f"quotas {[quota.count for quota in quotas]} of a cascade must be 0 or more, and "
                "one of them at least 1"
            )
        self.quotas = [quota for quota in quotas if quota.count > 0]
        self.ends = ends
        self.name = name or " then ".join(f"{q.drafter.name} {q.count}" for q in self.quotas)
        self.requires = TargetRequirements.union(q.drafter.requires for q in self.quotas)

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        draws = {quota.drafter.draw_kind(sampling) for quota in self.quotas}
        return "deterministic" if draws == {"deterministic"} else "iid"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> InTurnSession:
        sessions = [quota.drafter.open(source, sampling, randomness) for quota in self.quotas]
        return InTurnSession(self, sessions)


class InTurnSession:
    """A session of each drafter. Each is shown the drafts of those before it as if committed."""

    def __init__(self, drafter: InTurnDrafter, sessions: Sequence[DraftSession]) -> None:
        self.drafter, self.sessions = drafter, sessions

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        parts, length = [], len(tokens)
        for quota, session in zip(self.drafter.quotas, self.sessions, strict=True):
            count = len(tokens) - length
            room = min(quota.count, stop.longest - count)
            if room <= 0 or not stop.should_draft(DraftState(count)):
                break
            name = quota.name or quota.drafter.name
            part = yield from draft_with(session, name, tokens, room, target_state)
            part = part.until(self.drafter.ends)
            parts.append(part)
            tokens = torch.cat((tokens, part.tokens))
            if len(part.tokens) > 0 and int(tokens[-1]) in self.drafter.ends:
                break
        return join_chains(parts)


EMPTY = Proposal.empty()


def draft_with(
    session: DraftSession, name: str, tokens: Tensor, room: int, target_state: TargetState | None
) -> BatchedSteps[Proposal]:
    """What a drafter drafts behind committed tokens and others' drafts [T]; its calls counted."""
    began = perf_counter()
    part = (yield from as_steps(session.propose(tokens, target_state, FixedLength(room)))).on_host()
    own = {name: Calls(part.passes, perf_counter() - began)}
    return part if part.calls is not None else replace(part, calls=own)


def join_chains(parts: Sequence[Proposal]) -> Proposal:
    """Chains of several drafters, each behind the one before it, as one chain.

    Point masses among drawn tokens get rows of their own. Passes and calls add up.
    """
    calls: dict[str, Calls] = {}
    for part in parts:
        for name, own in (part.calls or {}).items():
            calls[name] = calls.get(name, Calls(0, 0.0)) + own

    def logits() -> list[Tensor | None]:
        known = ([None] * len(p.tokens) if p.logits is None else p.logits() for p in parts)
        pairs = zip(parts, known, strict=True)
        return [row for part, rows in pairs for row in rows[: len(part.tokens)]]

    tokens = torch.cat([EMPTY.tokens, *(part.tokens for part in parts)])
    passes = sum(part.passes for part in parts)
    found = Proposal.chain(tokens, passes=passes, logits=logits, calls=calls)
    drawn = [part.draft_probs for part in parts if part.draft_probs is not None]
    if not drawn:
        return found
    rows = [draft_rows(part, part.tokens.to(drawn[0].device), drawn[0]) for part in parts]
    copied = [part.is_copied for part in parts]
    return replace(found, draw_kind="iid", draft_probs=torch.cat(rows), copied=torch.cat(copied))


def review(
    inner: Proposal, logits: Tensor, sampling: Sampling, randomness: Randomness, leniency: float
) -> tuple[list[int], Tensor | None]:
    """Accept a run of the inner draft and add one token; the rows that these follow.

    Under sampling a reviewed token follows min(d, l r) + (1 - sum min(d, l r)) Norm[(r - d)+], d
    being its row inside and r the reviewer's, and the token behind an accepted draft follows r.
    Tokens that were copied, without a row of a model, are reviewed with l = 1.
    Greedy tokens are point masses (None). Shapes: logits [N + 1, V].
    """
    tokens = inner.tokens.tolist()
    if sampling.greedy:
        [best], accepted = arg_max_of_each([logits]), 0
        for place, token in enumerate(tokens):
            if token != best[place] and not _leniently(inner, place, token, logits, leniency):
                break
            accepted += 1
        return [*tokens[:accepted], best[accepted]], None
    probs = warp(logits, sampling)
    at_token = inner.tokens.to(probs.device)
    lenient = probs.new_full((len(tokens), 1), leniency)
    lenient = lenient.masked_fill(inner.is_copied.to(probs.device)[:, None], 1.0)
    draft = draft_rows(inner, at_token, probs)
    shared = torch.minimum(draft, lenient * probs[:-1])
    accepted = randomness.accept_run(acceptance_probability(shared, draft, at_token))
    rows = [
        row + (1.0 - row.sum()).clamp_min(0.0) * residual(mine, theirs)
        for row, mine, theirs in zip(shared[: accepted + 1], probs, draft, strict=False)
    ]
    left = probs[accepted]
    if accepted == len(tokens):
        rows.append(left)
    else:
        left = residual(left, draft[accepted])
    return [*tokens[:accepted], int(randomness.categorical(left[None])[0])], torch.stack(rows)


def _leniently(inner: Proposal, place: int, token: int, logits: Tensor, leniency: float) -> bool:
    """Whether the reviewer's unwarped probability exceeds the inner drafter's over l."""
    if leniency == 1.0 or inner.logits is None:
        return False
    row = inner.logits()[place]
    if row is None:
        return False
    own = row.softmax(dim=-1)[token]
    return bool(logits[place].softmax(dim=-1)[token] > own.to(logits) / leniency)


def cascade(
    levels: Sequence[Level],
    increments: Sequence[Sequence[int]],
    leniency: float = 1.0,
    ends: frozenset[int] = frozenset(),
    name: str | None = None,
) -> InTurnDrafter:
    """CS Drafting, Algorithm 1, over drafters from the largest down, as a rule to Max-Gram.

    increments[0][i]: tokens that level i adds to a round. A language model makes them by reviewing
    a cascade of the levels after it, whose increments are the rows from 1 on and the columns from i
    on; where those ask for nothing, and for drafters that cannot review, it drafts on its own. Row
    r has an entry for each level but the first r. ends: tokens behind which nothing is drafted.
    Raises ValueError for another shape.
    """
    check_increments(increments, [level.name for level in levels])
    quotas = []
    for i, (level, count) in enumerate(zip(levels, increments[0], strict=True)):
        rest, drafter = levels[i + 1 :], level.drafter
        below = [row[i:] for row in increments[1 : len(levels) - i]]
        if level.reviewer is not None and rest and any(below[0]):
            inner = cascade(rest, below, leniency, ends)
            drafter = ReviewedDrafter(level.reviewer, inner, sum(below[0]), leniency, level.name)
        quotas.append(Quota(drafter, count, level.name))
    return InTurnDrafter(quotas, name, ends)


def check_increments(increments: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Raise ValueError for a matrix that is no triangle over the levels, or asks for no token."""
    shape = [len(names) - row for row in range(len(names))]
    if [len(row) for row in increments] != shape or not any(increments[0]):
        raise ValueError(
            f"increments {show_increments(increments)!r} of a cascade of {', '.join(names)} must "
            f"have {len(names)} rows, of {', '.join(map(str, shape))} numbers: a row for each "
            "depth of reviews, a number for each level from that depth on; the first row must add "
            "up to 1 or more"
        )


def show_increments(increments: Sequence[Sequence[int]]) -> str:
    """The matrix as it is written on the command line: 5,3,2/4,10/10."""
    return "/".join(",".join(map(str, row)) for row in increments)
