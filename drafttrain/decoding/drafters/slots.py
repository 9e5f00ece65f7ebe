"""Drafting from blocks: all slots of a block are computed in one forward pass.

Greedy decoding proposes the likeliest token of each slot, a point mass. Under sampling, each token
is drawn from the distribution of its own slot, so rejection sampling stays lossless. With
previous-token features, tokens are chosen or drawn left to right from corrected distributions.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.decoding.batching import BatchedCall, BatchedSteps, arg_max_on_device
from drafttrain.decoding.drafters.candidates import Candidates, PreviousTokenCorrection
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source

NOTHING = replace(Proposal.empty(), passes=1)
"""The draft if the stop policy ends it at the first slot."""


def longest_draft(most: int, positions: int | None, committed: int) -> int:
    """Returns the maximal length of a draft, `most` or fewer, within the drafter's positions.

    The last token is never an input, so it needs no position.
    """
    return max(0, most if positions is None else min(most, positions + 1 - committed))


class SlotSession(ABC):
    """One sequence of a block drafter. It drafts chains, and draft trees grow over its slots."""

    def __init__(
        self, drafter: Any, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.drafter, self.source = drafter, source
        self.sampling, self.randomness = sampling, randomness
        self.correction: PreviousTokenCorrection | None = drafter.correction
        """Previous-token features; None if slots do not depend on each other's tokens."""
        self.state: SequenceState | None = None
        """None before the first draft."""

    @abstractmethod
    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        """Most tokens to draft after the committed tokens [T], `most` or fewer."""

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
        """Drafts a chain, up to where the stop policy ends it.

        Whether a slot is drafted depends only on logits that are known before its token is drawn:
        under sampling the corrected ones, in greedy decoding those before the correction.
        """
        slots = self.longest(tokens, stop.longest, target_state)
        if slots == 0:
            return Proposal.empty()
        states, logits = yield from self.slot_rows(tokens, slots)
        last, correction = self.token_before(tokens), self.correction
        if correction is not None and not self.sampling.greedy:
            return self._corrected_draws(states, logits, last, stop)
        rows, count, notes = logits.unbind(), 0, {}
        while count < slots and stop.should_draft(
            DraftState(count, rows[: count + 1], notes=notes)
        ):
            count += 1
        if count == 0:
            return NOTHING
        states, logits = states[:count], logits[:count]
        if correction is not None:
            drafted = yield BatchedCall(correction.chains, (states, logits, last))

            def corrected() -> tuple[Tensor, ...]:
                previous = torch.cat((drafted.new_tensor([last]), drafted[:-1]))
                return correction.after(states, logits, previous).unbind()

            return Proposal.chain(drafted, logits=corrected)
        if self.sampling.greedy:
            drafted = yield BatchedCall(arg_max_on_device, logits)
            return Proposal.chain(drafted, logits=logits.unbind)
        probs = warp(logits, self.sampling)
        return Proposal.chain(self.randomness.categorical(probs).cpu(), probs, logits=logits.unbind)

    def _corrected_draws(
        self, states: Tensor, logits: Tensor, last: int, stop: StopPolicy
    ) -> Proposal:
        """`propose` under sampling with previous-token features, from states [K, D] and logits
        [K, V]; `last` is the token before the block."""
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
            return NOTHING
        tokens, known = torch.cat(drawn).cpu(), known[: len(drawn)]
        return Proposal.chain(tokens, torch.stack(probs), logits=lambda: known)
