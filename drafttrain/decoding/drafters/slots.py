"""Drafts of slots whose rows are there at once: how many are drafted, and what."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.shared import Call, Steps, arg_max_of_each
from drafttrain.decoding.types import DraftState, Proposal, Sampling


def slots_to_draft(stop: StopPolicy, logits: Tensor, hidden: Tensor | None = None) -> int:
    """How many slots of a block a stop policy drafts. Shapes: logits [K, V], hidden [K, D]."""
    rows, states = logits.unbind(), () if hidden is None else hidden.unbind()
    notes: dict[str, list[float]] = {}
    for depth in range(len(rows)):
        if not stop.should_draft(DraftState(depth, rows[: depth + 1], states, notes)):
            return depth
    return len(rows)


def chain_of_slots(
    logits: Tensor, stop: StopPolicy, sampling: Sampling, randomness: Randomness
) -> Steps[Proposal]:
    """The draft of slots that do not depend on each other's tokens, as far as the policy drafts.

    The arg-max of every row, or a token drawn from each. Shapes: logits [K, V].
    """
    logits = logits[: slots_to_draft(stop, logits)]
    if len(logits) == 0:
        return Proposal.empty()
    rows = logits.unbind()
    if sampling.greedy:
        drafted = yield Call(arg_max_of_each, logits)
        return Proposal.chain(torch.tensor(drafted), logits=rows)
    probs = warp(logits, sampling)
    return Proposal.chain(randomness.categorical(probs).cpu(), probs, logits=rows)
