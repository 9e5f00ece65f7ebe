"""Drafting from blocks: all slots of a block are computed in one forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from drafttrain.decoding.batching import BatchedCall, BatchedSteps, arg_max_on_device
from drafttrain.decoding.drafters.candidates import Candidates, PreviousTokenCorrection
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source


class SlotSession(ABC):
    """One sequence of a block drafter. It drafts chains, and draft trees grow over its slots."""

    correction: PreviousTokenCorrection | None = None
    """Previous-token features; None if slots do not depend on each other's tokens."""

    def __init__(
        self, drafter: Any, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.drafter, self.source = drafter, source
        self.sampling, self.randomness = sampling, randomness

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
        states, logits = yield from self.slot_rows(tokens, slots)
        last = self.token_before(tokens)
        return (yield from self.chain(states, logits, last, stop))

    def chain(
        self, states: Tensor, logits: Tensor, last: int, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        """Drafts a chain from the slots of a block, up to where the stop policy ends it.

        Greedy drafts take the likeliest token of each slot. With previous-token features they are
        chosen left to right, each given the previous one; `last` is the token before the block. The
        policy then sees the logits before the correction.
        Under sampling, each token is drawn from its own distribution, with previous-token features
        from the corrected one, which the policy then sees too. Whether a slot is drafted depends
        only on logits that are known before its token is drawn. Shapes: states [K, D], logits
        [K, V].
        """
        if self.correction is not None and not self.sampling.greedy:
            return self._corrected_draws(states, logits, last, stop)
        rows, count = logits.unbind(), 0
        notes: dict[str, list[float]] = {}
        while count < len(rows):
            if not stop.should_draft(DraftState(count, rows[: count + 1], notes=notes)):
                break
            count += 1
        if count == 0:
            return Proposal.chain(torch.empty(0, dtype=torch.long))
        states, logits = states[:count], logits[:count]
        if self.correction is not None:
            correction = self.correction
            tokens = yield BatchedCall(correction.chains, (states, logits, last))
            first = torch.tensor([last]).to(tokens.device)

            def corrected() -> tuple[Tensor, ...]:
                return correction.after(states, logits, torch.cat((first, tokens[:-1]))).unbind()

            return Proposal.chain(tokens, logits=corrected)
        if self.sampling.greedy:
            tokens = yield BatchedCall(arg_max_on_device, logits)
            return Proposal.chain(tokens, logits=logits.unbind)
        probs = warp(logits, self.sampling)
        tokens = self.randomness.categorical(probs).cpu()
        return Proposal.chain(tokens, probs, logits=logits.unbind)

    def _corrected_draws(
        self, states: Tensor, logits: Tensor, last: int, stop: StopPolicy
    ) -> Proposal:
        """`chain` under sampling with previous-token features."""
        candidates = Candidates(states[None], logits[None], self.correction)
        known = list(logits.unbind())
        drawn: list[Tensor] = []
        probs: list[Tensor] = []
        notes: dict[str, list[float]] = {}
        previous = torch.tensor([[last]], device=logits.device)
        for depth in range(len(known)):
            after, best = candidates.after(depth, previous)[0, 0], candidates.tokens[0, depth]
            known[depth] = known[depth].index_copy(0, best, after.to(logits.dtype))
            if not stop.should_draft(DraftState(depth, known[: depth + 1], notes=notes)):
                break
            row = warp(known[depth], self.sampling)
            drawn.append(self.randomness.categorical(row[None]))
            previous = drawn[-1][None]
            probs.append(row)
        if not drawn:
            return Proposal.chain(torch.empty(0, dtype=torch.long))
        tokens, known = torch.cat(drawn).cpu(), known[: len(drawn)]
        return Proposal.chain(tokens, torch.stack(probs), logits=lambda: known)
