"""What a drafter would have drafted after its rejected tokens, beside an output that it knows.

All branches of an output grow together, as a tree over the cached output, where the architecture
takes explicit positions; one after another elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.evaluation.stops.trace import WrongBranch
from drafttrain.models.draft_states import drawn_states

Pick = Callable[[Tensor], list[int]]
"""The next token of each row of logits, drawn as the drafter draws. [N, V] -> N tokens."""


def grow_as_tree(
    model: CachedModel,
    state: SequenceState,
    cached: int,
    before: int,
    branches: Sequence[WrongBranch],
    pick: Pick,
) -> None:
    """Draft all branches together: a call feeds the last token of each.

    state holds `cached` tokens: `before` of them, then the output. A branch at position i sees the
    first before + i of them and its own tokens. Raises ValueError where the architecture takes no
    explicit positions.
    """
    growing = [branch for branch in branches if branch.goes_on]
    device = model.device
    places = torch.arange(cached, device=device)
    starts = torch.tensor([before + branch.position for branch in growing], device=device)
    visible = places < starts[:, None]  # [N, columns so far], a row for each growing branch
    while growing:
        count = len(growing)
        visible = torch.cat([visible, torch.eye(count, dtype=torch.bool, device=device)], dim=1)
        depth = len(growing[0].tokens) - 1  # all grow at the same pace
        tokens = torch.tensor([branch.tokens[-1] for branch in growing], device=device)
        score = model.extend(state, tokens, visible, starts + depth)
        _feed_all(growing, score.logits, score.hidden, pick)
        left = [i for i, branch in enumerate(growing) if branch.goes_on]
        growing = [growing[i] for i in left]
        visible, starts = visible[left], starts[left]


def grow_one_by_one(
    model: CachedModel,
    state: SequenceState,
    path: Tensor,
    before: int,
    branches: Sequence[WrongBranch],
    pick: Pick,
) -> None:
    """The same, a branch after another, the last position first so that little is fed twice.

    path [T]: the tokens before the output, `before` of them, then the output.
    """
    for branch in sorted(branches, key=lambda branch: -branch.position):
        committed = path[: before + branch.position]
        while branch.goes_on:
            tokens = torch.cat([committed, committed.new_tensor(branch.tokens)])
            score = model.catch_up(state, tokens)
            _feed_all([branch], score.logits[-1:], score.hidden[-1:], pick)


def row_facts(logits: Tensor) -> Tensor:
    """Entropy in nats and largest probability of each row. Shapes: [..., V] -> [..., 2]."""
    probs = logits.softmax(dim=-1)
    return torch.stack((torch.special.entr(probs).sum(dim=-1), probs.amax(dim=-1)), dim=-1)


def _feed_all(branches: Sequence[WrongBranch], logits: Tensor, hidden: Tensor, pick: Pick) -> None:
    rows, tokens = row_facts(logits).tolist(), pick(logits)
    drawn: Sequence[Tensor | None] = [None] * len(branches)
    if branches[0].drawn is not None:
        drawn = drawn_states(hidden, logits, torch.tensor(tokens)).unbind()
    for branch, *facts in zip(branches, hidden, rows, tokens, drawn, strict=True):
        branch.feed(*facts)
