"""Drafting from blocks: all slots of a block are computed in one forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from drafttrain.decoding.batching import BatchedCall, BatchedSteps, arg_max_on_device
from drafttrain.decoding.drafters.candidates import Candidates, PreviousTokenCorrection
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling


def slots_to_draft(stop: StopPolicy, logits: Tensor, hidden: Tensor) -> int:
    """Returns how many slots of a block the stop policy drafts.

    The policy sees the states of all slots: none depends on a draft token. Shapes: logits [K, V],
    hidden [K, D].
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
    """Drafts a chain from the slots of a block, up to where the stop policy ends it.

    Greedy drafts take the likeliest token of each slot. With previous-token features (`correction`)
    they are chosen left to right, each given the previous one; `last` is the token before the
    block. The policy then sees the logits before the correction.
    Under sampling, each token is drawn from its own distribution, with previous-token features from
    the corrected one, which the policy then sees too. Whether a slot is drafted depends only on
    logits and states that are known before its token is drawn. Shapes: logits [K, V], hidden
    [K, D].
    """
    if correction is not None and not sampling.greedy:
        return _corrected_draws(hidden, logits, correction, last, stop, sampling, randomness)
    count = slots_to_draft(stop, logits, hidden)
    states, logits = hidden[:count], logits[:count]
    if count == 0:
        return Proposal.chain(torch.empty(0, dtype=torch.long), hidden=hidden)
    if correction is not None:
        tokens = yield BatchedCall(correction.chains, (states, logits, last))
        rows = partial(_corrected_rows, correction, states, logits, last, tokens)
        return Proposal.chain(tokens, hidden=hidden, logits=rows)
    if sampling.greedy:
        tokens = yield BatchedCall(arg_max_on_device, logits)
        return Proposal.chain(tokens, hidden=hidden, logits=logits.unbind)
    probs = warp(logits, sampling)
    tokens = randomness.categorical(probs).cpu()
    return Proposal.chain(tokens, probs, hidden=hidden, logits=logits.unbind)


def _corrected_draws(
    hidden: Tensor,
    logits: Tensor,
    correction: PreviousTokenCorrection,
    last: int,
    stop: StopPolicy,
    sampling: Sampling,
    randomness: Randomness,
) -> Proposal:
    """`chain_of_slots` under sampling with previous-token features."""
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


def _corrected_rows(
    correction: PreviousTokenCorrection, states: Tensor, logits: Tensor, last: int, tokens: Tensor
) -> Sequence[Tensor]:
    before = torch.cat((torch.tensor([last]).to(tokens.device), tokens))
    return correction.after(states, logits, before[: len(states)]).unbind()


class SlotSession(ABC):
    """One sequence of a block drafter. It drafts chains, and draft trees grow over its slots."""

    correction: PreviousTokenCorrection | None = None
    """Previous-token features; None if slots do not depend on each other's tokens."""
    sampling: Sampling
    randomness: Randomness

    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        """Most tokens to draft after the committed tokens [T], `most` or fewer."""
        return most

    def token_before(self, tokens: Tensor) -> int:
        """Returns the previous token of the first slot."""
        return int(tokens[-1])

    @abstractmethod
    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        """Computes the states and logits of the slots after the committed tokens, before
        previous-token features. Shapes: tokens [T] -> [slots, D], [slots, V]."""

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
