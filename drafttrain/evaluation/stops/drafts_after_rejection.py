"""What a drafter would have drafted after its rejected tokens, beside an output that it knows.

All branches of an output grow together, as a tree over the cached output, where the architecture
takes explicit positions; one after another elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.calls import StepOutput
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.evaluation.stops.trace import WrongBranch
from drafttrain.models.draft_states import drawn_states

Pick = Callable[[Tensor], list[int]]
"""The next token of each row of logits, drawn as the drafter draws. [N, V] -> N tokens."""


class Beside:
    """Branches beside an output that a model has cached; a call feeds a token of each.

    state holds `cached` tokens: `before` of them, then the output. A branch at position i sees the
    first before + i of them and its own tokens. `feed` raises ValueError where the architecture
    takes no explicit positions.
    """

    def __init__(
        self, model: CachedModel, state: SequenceState, cached: int, before: int, at: Sequence[int]
    ) -> None:
        self.model, self.state = model, state
        self._next = torch.tensor([before + position for position in at], device=model.device)
        places = torch.arange(cached, device=model.device)
        self._visible = places < self._next[:, None]  # [N, columns so far], a row for each branch

    def feed(self, tokens: Sequence[int]) -> StepOutput:
        """What follows one token more of every branch. [N] -> logits [N, V], hidden [N, D]."""
        count, device = len(tokens), self.model.device
        own = torch.eye(count, dtype=torch.bool, device=device)
        self._visible = torch.cat([self._visible, own], dim=1)
        fed = torch.tensor(tokens, device=device)
        score = self.model.extend(self.state, fed, self._visible, self._next)
        self._next = self._next + 1
        return score

    def keep(self, left: Sequence[int]) -> None:
        """Go on with these branches alone."""
        left = list(left)
        self._visible, self._next = self._visible[left], self._next[left]


def grow_as_tree(
    model: CachedModel,
    state: SequenceState,
    cached: int,
    before: int,
    branches: Sequence[WrongBranch],
    pick: Pick,
) -> None:
    """Draft all branches together: a call feeds the last token of each (`Beside`)."""
    growing = [branch for branch in branches if branch.goes_on]
    beside = Beside(model, state, cached, before, [branch.position for branch in growing])
    while growing:
        score = beside.feed([branch.tokens[-1] for branch in growing])
        feed_all(growing, score.logits, score.hidden, pick(score.logits))
        left = [i for i, branch in enumerate(growing) if branch.goes_on]
        growing = [growing[i] for i in left]
        beside.keep(left)


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
            feed_all([branch], score.logits[-1:], score.hidden[-1:], pick(score.logits[-1:]))


def row_facts(logits: Tensor) -> Tensor:
    """Entropy in nats and largest probability of each row. Shapes: [..., V] -> [..., 2]."""
    probs = logits.softmax(dim=-1)
    return torch.stack((torch.special.entr(probs).sum(dim=-1), probs.amax(dim=-1)), dim=-1)


def feed_all(
    branches: Sequence[WrongBranch], logits: Tensor, hidden: Tensor, tokens: list[int]
) -> None:
    """Hand every branch its newest row and state, and the token drawn from that row."""
    rows = row_facts(logits).tolist()
    drawn: Sequence[Tensor | None] = [None] * len(branches)
    if branches[0].drawn is not None:
        drawn = drawn_states(hidden, logits, torch.tensor(tokens)).unbind()
    for branch, *facts in zip(branches, hidden, rows, tokens, drawn, strict=True):
        branch.feed(*facts)
