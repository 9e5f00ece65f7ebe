"""Cascades of drafters (CS Drafting, Chen et al. 2024): reviews inside, and quotas in turn.

Vertical: a drafter's own drafting is sped up by a smaller one, whose tokens it reviews; leniency
lets it accept more than its own distribution would. Horizontal: the first tokens of a round come
from a larger drafter, which matters more, the later ones from smaller ones. Both are drafters, so
they nest. Whatever happens inside, each token is handed out with the row it follows in law, and
the target's own review stays exact. Which level drafts, and how much, depends on counts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.cached_model import CachedModel
from drafttrain.decoding.drafters.causal import OwnSequence
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import (
    Chance,
    Drafter,
    DraftSession,
    DraftState,
    Draw,
    Proposal,
    Sampling,
    Sight,
    Source,
    StopPolicy,
    TargetState,
)
from drafttrain.decoding.verifiers import residual

MAX_GRAM_TOKENS = 10
"""Tokens that Max-Gram is asked for at once (Section 5 of the paper)."""


class ReviewedDrafter:
    """Vertical cascade: `reviewer` drafts by reviewing chains of `k` tokens from `inner`.

    leniency l: an inner token is accepted with min(1, l r / d) under sampling, r and d being the
    reviewer's and the inner drafter's probability; in greedy decoding where it is the reviewer's
    arg-max, or its unwarped r exceeds d / l. Drafts without rows of their own, as Max-Gram's, are
    reviewed with l = 1. Raises ValueError for l below 1 and k below 1.
    """

    shows: frozenset[Sight] = frozenset()
    branches = False

    def __init__(
        self,
        reviewer: CachedModel,
        inner: Drafter,
        k: int = MAX_GRAM_TOKENS,
        leniency: float = 1.0,
        name: str = "causal",
    ) -> None:
        if not leniency >= 1.0:
            raise ValueError(f"leniency = {leniency} must be 1 (none) or more")
        if k < 1:
            raise ValueError(f"k = {k} tokens for a review must be at least 1")
        self.reviewer, self.inner, self.k, self.leniency = reviewer, inner, k, leniency
        self.of = name

    @property
    def name(self) -> str:
        lenient = f",l={self.leniency:g}" if self.leniency > 1.0 else ""
        return f"{self.of}<{self.inner.name} {self.k}{lenient}>"

    @property
    def vocabulary(self) -> int:
        """Tokens that it can draft."""
        return self.reviewer.vocabulary

    def draw(self, sampling: Sampling) -> Draw:
        return "deterministic" if sampling.greedy else "iid"

    def start(self, source: Source, sampling: Sampling, chance: Chance) -> ReviewedSession:
        """Open a session. Raises ValueError for a source longer than a level's positions."""
        return ReviewedSession(self, source, sampling, chance)


class ReviewedSession:
    """One sequence: the reviewer's cache, and a session of the inner drafter."""

    def __init__(
        self, drafter: ReviewedDrafter, source: Source, sampling: Sampling, chance: Chance
    ) -> None:
        self.drafter, self.sampling, self.chance = drafter, sampling, chance
        self.own = OwnSequence(drafter.reviewer, source)
        self.inner = drafter.inner.start(source, sampling, chance)

    @torch.inference_mode()
    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        reviewer, ends = self.drafter.reviewer, self.drafter.reviewer.eos_ids
        fed = len(self.own.tokens(tokens))
        longest = self.own.longest(stop.longest, fed)
        found = Draft(tokens)
        while len(found.tokens) < longest and stop.admit(DraftState(len(found.tokens))):
            room = longest - len(found.tokens) - 1  # one token follows what is accepted
            inner = Proposal.empty()
            if room > 0:
                inner = self.inner.propose(
                    found.sequence(), None, FixedLength(min(self.drafter.k, room))
                )
            [score] = reviewer.score([self.own.state], [self.own.tokens(found.sequence())], [inner])
            emitted, rows = review(
                inner, score.logits, self.sampling, self.chance, self.drafter.leniency
            )
            reviewer.keep(self.own.state, torch.arange(len(emitted) - 1))
            found.add(emitted, rows, list(score.logits[: len(emitted)]), 1 + inner.passes)
            if found.cut_after(ends):
                break
        return found.proposal()


@dataclass
class Quota:
    """So many tokens of a round come from this drafter."""

    drafter: Drafter
    count: int


class InTurnDrafter:
    """Horizontal cascade: each drafter adds its quota to the draft of those before it.

    Raises ValueError for negative quotas, and where all are zero.
    """

    shows: frozenset[Sight] = frozenset()
    branches = False

    def __init__(self, quotas: Sequence[Quota]) -> None:
        if any(quota.count < 0 for quota in quotas) or not any(q.count for q in quotas):
            raise ValueError(
                f"quotas {[quota.count for quota in quotas]} of a cascade must be 0 or more, and "
                "one of them at least 1"
            )
        self.quotas = [quota for quota in quotas if quota.count > 0]

    @property
    def name(self) -> str:
        return " then ".join(f"{quota.drafter.name} {quota.count}" for quota in self.quotas)

    def draw(self, sampling: Sampling) -> Draw:
        return "deterministic" if sampling.greedy else "iid"

    def start(self, source: Source, sampling: Sampling, chance: Chance) -> InTurnSession:
        sessions = [quota.drafter.start(source, sampling, chance) for quota in self.quotas]
        return InTurnSession([quota.count for quota in self.quotas], sessions)


class InTurnSession:
    """A session of each drafter. Each is shown the drafts of those before it as if committed."""

    def __init__(self, counts: Sequence[int], sessions: Sequence[DraftSession]) -> None:
        self.counts, self.sessions = counts, sessions

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        found = Draft(tokens)
        for count, session in zip(self.counts, self.sessions, strict=True):
            room = min(count, stop.longest - len(found.tokens))
            if room <= 0 or not stop.admit(DraftState(len(found.tokens))):
                break
            part = session.propose(found.sequence(), target_state, FixedLength(room))
            found.extend(part)
            if len(part.tokens) < room:
                break  # the sequence ended, or nothing more is known
        return found.proposal()


class Draft:
    """A chain under way, put together from pieces of several drafters."""

    def __init__(self, committed: Tensor) -> None:
        self.committed = committed
        self.tokens: list[int] = []
        self.rows: list[Tensor | None] = []
        """[V] what each token was drawn from; None: a point mass."""
        self.logits: list[Tensor] | None = []
        """[V] each: rows before warping; None where some drafter has none."""
        self.passes = 0

    def sequence(self) -> Tensor:
        """The committed tokens and the draft so far."""
        return torch.cat((self.committed, self.committed.new_tensor(self.tokens)))

    def add(
        self,
        tokens: Sequence[int],
        rows: Sequence[Tensor | None],
        logits: Sequence[Tensor] | None,
        passes: int,
    ) -> None:
        self.tokens += tokens
        self.rows += rows
        self.passes += passes
        if logits is None or self.logits is None:
            self.logits = None
        else:
            self.logits += logits

    def extend(self, part: Proposal) -> None:
        """Append another drafter's chain."""
        rows = [None] * len(part.tokens) if part.draft_probs is None else list(part.draft_probs)
        self.add(part.tokens.tolist(), rows, part.logits, part.passes)

    def cut_after(self, ends: frozenset[int]) -> bool:
        """Leave out what follows the first token that ends the sequence; whether there is one."""
        for place, token in enumerate(self.tokens):
            if token in ends:
                del self.tokens[place + 1 :], self.rows[place + 1 :]
                if self.logits is not None:
                    del self.logits[place + 1 :]
                return True
        return False

    def proposal(self) -> Proposal:
        """The chain; point masses among drawn tokens get rows of their own."""
        if not self.tokens:
            return Proposal.empty()
        drawn = next((row for row in self.rows if row is not None), None)
        probs = None
        if drawn is not None:
            rows = [
                torch.zeros_like(drawn).index_fill_(
                    0, torch.tensor(token, device=drawn.device), 1.0
                )
                if row is None
                else row
                for token, row in zip(self.tokens, self.rows, strict=True)
            ]
            probs = torch.stack(rows)
        return Proposal.chain(torch.tensor(self.tokens), probs, self.passes, logits=self.logits)


def _point(token: int, like: Tensor) -> Tensor:
    """A row that is all on one token. Shapes: like [V] -> [V]."""
    row = torch.zeros_like(like)
    row[token] = 1.0
    return row


def review(
    inner: Proposal, logits: Tensor, sampling: Sampling, chance: Chance, leniency: float
) -> tuple[list[int], list[Tensor | None]]:
    """Accept a run of the inner draft and add one token; the rows that these follow.

    Under sampling a reviewed token follows min(d, l r) + (1 - sum min(d, l r)) Norm[(r - d)+], d
    being its row inside and r the reviewer's, and the token behind an accepted draft follows r.
    Greedy tokens are point masses (None). Shapes: logits [N + 1, V].
    """
    tokens = inner.tokens.tolist()
    if sampling.greedy:
        return _review_greedily(inner, tokens, logits, leniency)
    probs = warp(logits, sampling)
    if not tokens:
        return [int(chance.categorical(probs)[0])], [probs[0]]
    if inner.draft_probs is None:
        leniency = 1.0
        draft = torch.zeros_like(probs[:-1]).scatter_(
            1, inner.tokens[:, None].to(probs.device), 1.0
        )
    else:
        draft = inner.draft_probs.to(probs)
    shared = torch.minimum(draft, leniency * probs[:-1])
    at_token = inner.tokens[:, None].to(probs.device)
    smallest = torch.finfo(draft.dtype).tiny
    likely = (shared.gather(1, at_token) / draft.gather(1, at_token).clamp_min(smallest))[:, 0]
    accepted = chance.accept_run(likely.clamp_max(1.0))
    rows: list[Tensor | None] = []
    for row, mine, theirs in zip(shared, probs, draft, strict=False):
        rows.append(row + (1.0 - row.sum()).clamp_min(0.0) * residual(mine, theirs))
        if len(rows) > accepted:
            break
    if accepted == len(tokens):
        rows.append(probs[accepted])
        left = probs[accepted]
    else:
        left = residual(probs[accepted], draft[accepted])
    return [*tokens[:accepted], int(chance.categorical(left[None])[0])], rows


def _review_greedily(
    inner: Proposal, tokens: list[int], logits: Tensor, leniency: float
) -> tuple[list[int], list[Tensor | None]]:
    best = logits.argmax(dim=-1).tolist()
    accepted = 0
    for place, token in enumerate(tokens):
        if token != best[place] and not _leniently(inner, place, token, logits, leniency):
            break
        accepted += 1
    emitted = [*tokens[:accepted], best[accepted]]
    return emitted, [None] * len(emitted)


def _leniently(inner: Proposal, place: int, token: int, logits: Tensor, leniency: float) -> bool:
    """Whether the reviewer's unwarped probability exceeds the inner drafter's over l."""
    if leniency == 1.0 or inner.logits is None:
        return False
    own = inner.logits[place].softmax(dim=-1)[token]
    return bool(logits[place].softmax(dim=-1)[token] > own.to(logits) / leniency)


def cascade(
    models: Sequence[CachedModel],
    statistical: Drafter,
    increments: Sequence[Sequence[int]],
    leniency: float = 1.0,
    names: Sequence[str] = (),
) -> InTurnDrafter:
    """CS Drafting, Algorithm 1, over models from the largest drafter down.

    increments[0][i]: tokens that model i adds to a round, reviewing a cascade of the models after
    it whose increments are the rows from 1 on and the columns from i on; the last model reviews
    what the statistical drafter says. Row r has an entry for each model but the last r. Raises
    ValueError for another shape.
    """
    shape = [len(models) - row for row in range(len(models))]
    if [len(row) for row in increments] != shape:
        raise ValueError(
            f"increments {[list(row) for row in increments]} of a cascade of {len(models)} models "
            f"must have rows of {', '.join(map(str, shape))} numbers: each row a level deeper, a "
            "number a model"
        )
    names = names or [f"m{i + 1}" for i in range(len(models))]
    quotas = []
    for i, count in enumerate(increments[0]):
        rest = models[i + 1 :]
        if count == 0:
            continue
        inner, k = statistical, MAX_GRAM_TOKENS
        if rest:
            below = [row[i:] for row in increments[1 : 1 + len(rest)]]
            inner, k = cascade(rest, statistical, below, leniency, names[i + 1 :]), sum(below[0])
        quotas.append(
            Quota(ReviewedDrafter(models[i], inner, max(k, 1), leniency, names[i]), count)
        )
    return InTurnDrafter(quotas)
