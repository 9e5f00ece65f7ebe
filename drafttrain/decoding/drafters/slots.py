"""Blocks of slots whose rows or states are there at once: how many are drafted, and what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from drafttrain.decoding.batching import BatchedCall, BatchedSteps, likeliest_of_each
from drafttrain.decoding.drafters.candidates import Candidates, PreviousTokenCorrection
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling


def slots_to_draft(stop: StopPolicy, logits: Tensor, hidden: Tensor) -> int:
    """How many slots of a block a stop policy drafts. Shapes: logits [K, V], hidden [K, D].

    It is shown the states of all slots: none of them depends on a token that is drafted.
    """
    rows, states = logits.unbind(), hidden.unbind()
    notes: dict[str, list[float]] = {}
    for depth in range(len(rows)):
        if not stop.should_draft(DraftState(depth, rows[: depth + 1], states, notes=notes)):
            return depth
    return len(rows)


def chain_of_slots(
    logits: Tensor,
    stop: StopPolicy,
    sampling: Sampling,
    randomness: Randomness,
    hidden: Tensor,
    correction: PreviousTokenCorrection | None = None,
    last: int = 0,
) -> BatchedSteps[Proposal]:
    """The draft of slots, as far as the policy drafts.

    Greedy drafts are the likeliest token of every slot; with a link left to right, each after the
    one before it, `last` in front of the block. A policy is shown the rows without that token.
    Under sampling each token is drawn from its row, with a link that after the token before it,
    which the policy is shown. Whether a slot is drafted depends on rows and states alone, which are
    there before its token is drawn. Shapes: logits [K, V], hidden [K, D].
    """
    if correction is not None and not sampling.greedy:
        return _corrected_draws(hidden, logits, correction, last, stop, sampling, randomness)
    count = slots_to_draft(stop, logits, hidden)
    states, alone = hidden[:count], logits[:count]
    if count == 0:
        return Proposal.chain(torch.empty(0, dtype=torch.long), hidden=hidden)
    if correction is not None:
        tokens = yield BatchedCall(correction.chains, (states, alone, last))
        rows = partial(_rows_after, correction, states, alone, last, tokens)
        return Proposal.chain(tokens, hidden=hidden, logits=rows)
    if sampling.greedy:
        tokens = yield BatchedCall(likeliest_of_each, alone)
        return Proposal.chain(tokens, hidden=hidden, logits=alone.unbind)
    probs = warp(alone, sampling)
    tokens = randomness.categorical(probs).cpu()
    return Proposal.chain(tokens, probs, hidden=hidden, logits=alone.unbind)


def _corrected_draws(
    hidden: Tensor,
    logits: Tensor,
    correction: PreviousTokenCorrection,
    last: int,
    stop: StopPolicy,
    sampling: Sampling,
    randomness: Randomness,
) -> Proposal:
    """`chain_of_slots` under sampling, of slots whose rows depend on the token before them."""
    candidates = Candidates(hidden[None], logits[None], correction)
    states, known = hidden.unbind(), list(logits.unbind())
    drawn: list[Tensor] = []
    probs: list[Tensor] = []
    notes: dict[str, list[float]] = {}
    previous = torch.tensor([[last]], device=logits.device)
    for depth in range(len(states)):
        after, best = candidates.after(depth, previous)[0, 0], candidates.tokens[0, depth]
        known[depth] = known[depth].index_copy(0, best, after.to(logits.dtype))
        if not stop.should_draft(DraftState(depth, known[: depth + 1], states, notes=notes)):
            break
        row = warp(known[depth], sampling)
        drawn.append(randomness.categorical(row[None]))
        previous = drawn[-1][None]
        probs.append(row)
    if not drawn:
        return Proposal.chain(torch.empty(0, dtype=torch.long), hidden=hidden)
    tokens, known = torch.cat(drawn).cpu(), known[: len(drawn)]
    return Proposal.chain(tokens, torch.stack(probs), hidden=hidden, logits=lambda: known)


def _rows_after(
    correction: PreviousTokenCorrection, states: Tensor, alone: Tensor, last: int, tokens: Tensor
) -> Sequence[Tensor]:
    before = torch.cat((torch.tensor([last]).to(tokens.device), tokens))
    return correction.after(states, alone, before[: len(states)]).unbind()


class SlotSession(ABC):
    """One sequence of a drafter whose slots' rows are there at once: chains of them, and what draft
    trees grow over."""

    correction: PreviousTokenCorrection | None = None
    """Where a slot's row depends on the token before it."""
    sampling: Sampling
    randomness: Randomness

    def longest(self, tokens: Tensor, wanted: int, target_state: TargetState | None) -> int:
        """Most tokens of a draft behind all committed tokens [T]."""
        return wanted

    def token_before(self, tokens: Tensor) -> int:
        """The token before the first slot, whose features it reads."""
        return int(tokens[-1])

    @abstractmethod
    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        """States and rows, without the token before, of so many slots behind all committed tokens.
        Shapes: tokens [T] -> [slots, D], [slots, V]."""

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        slots = self.longest(tokens, stop.longest, target_state)
        if slots == 0:
            return Proposal.empty()
        hidden, logits = yield from self.slot_rows(tokens, slots)
        drawing = stop, self.sampling, self.randomness, hidden
        last = self.token_before(tokens)
        return (yield from chain_of_slots(logits, *drawing, self.correction, last))
