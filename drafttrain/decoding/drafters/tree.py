"""Draft trees: a shape adds the children of each level, from the drafter's rows for their parents.

A row is the drafter's logits for the token after a node. Every shape of `decoding/trees` works with
the rows of a language model (`ModelRows`) and with those of a block drafter (`SlotRows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafttrain.config.kinds import KINDS, DrawKind, Evidence
from drafttrain.decoding.batching import BatchedCall, BatchedSteps, as_steps
from drafttrain.decoding.drafters.candidates import LikelyTokens
from drafttrain.decoding.drafters.causal import CausalDrafter, DrafterSequence
from drafttrain.decoding.drafters.slots import SlotSession
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.trees.shapes import Array, Likeliest, Shape, Tree
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source


class GrowingDrafter(Drafter, Protocol):
    """A drafter that draft trees can grow over (`DrafterKind.tree_rows`)."""

    vocabulary: int
    eos_ids: frozenset[int]


class TreeSession:
    """One sequence. Between rounds it keeps only the cache of its rows."""

    def __init__(
        self, drafter: TreeDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        if drafter.draft_temperature is not None:
            sampling = replace(sampling, temperature=drafter.draft_temperature)
        self.shape, self.ends = drafter.shape, drafter.drafter.eos_ids
        self.sampling, self.randomness = sampling, randomness
        make_rows = resolve_name(KINDS[drafter.drafter.name].tree_rows)
        self.rows: ModelRows | SlotRows = make_rows(drafter.drafter, source, sampling, randomness)

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        longest = self.rows.longest(tokens, stop.longest, target_state)
        if longest == 0 or not stop.should_draft(DraftState(0)):
            return Proposal.empty()
        tree = Tree(self.shape, self.sampling, self.randomness, self.ends)
        likeliest = self.shape.likeliest(self.sampling)
        rows = yield from self.rows.first(tokens, longest, likeliest)
        while True:
            frontier = tree.choose(*rows) if isinstance(rows, tuple) else tree.grow(rows)
            if not frontier or tree.level == longest:
                break
            if not stop.should_draft(DraftState(tree.level, expected=tree.expected)):
                break
            rows = yield from self.rows.below(tree)
        return tree.proposal(self.rows.passes)


class TreeDrafter(Drafter):
    """Drafts trees of one shape from the rows of a drafter.

    draft_temperature: temperature of the distributions that tokens are drawn from; None: the
    target's. Shapes that choose tokens have their own. Raises ValueError for a model without tree
    attention.
    """

    session = TreeSession

    def __init__(
        self, drafter: GrowingDrafter, shape: Shape, draft_temperature: float | None = None
    ) -> None:
        self.drafter, self.shape, self.draft_temperature = drafter, shape, draft_temperature
        self.name = shape.name
        if KINDS[drafter.name].is_language_model:
            drafter.model.check_tree_attention()
        else:
            self.name = f"{drafter.name} {shape.name}"
        self.requires, self.drafts_trees = drafter.requires, shape.drafts_trees

    @property
    def provides(self) -> frozenset[Evidence]:
        return frozenset({"expected"} if self.shape.estimates else ())

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return self.shape.draw_kind


class ModelRows:
    """Rows of a language model: one forward pass per level, with tree attention.

    Nodes that were computed and accepted stay cached for the next round.
    """

    def __init__(
        self, drafter: CausalDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.model = drafter.model
        self.sequence = DrafterSequence(drafter.model, source)
        self.passes = 0
        """Number of forward passes in this round so far."""
        self._committed = 0
        self._ancestors: dict[int, list[int]] = {}
        """Cache columns of each computed node's ancestors in the tree and of itself."""
        self._columns: dict[tuple[int, int], int] = {}
        """(column of the parent, token) -> column; the parent of a root has column -1."""

    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        """Most levels to draft after the committed tokens [T], `most` or fewer."""
        return self.sequence.longest(tokens, most)

    def first(
        self, tokens: Tensor, levels: int, likeliest: Likeliest | None
    ) -> BatchedSteps[Tensor]:
        """Computes the row after the committed tokens [T], for `Tree.grow`."""
        tokens, state = self.sequence.tokens(tokens), (yield from self.sequence.begin())
        self._keep_accepted(state, tokens[self._committed : -1].tolist())
        request = ForwardRequest(state, state.align(tokens), logits_to_keep=1)
        score = yield BatchedCall(self.model.forward_batch, request)
        self._committed = len(tokens)
        self._ancestors, self._columns = {-1: []}, {}
        self.passes = 1
        return score.logits

    def below(self, tree: Tree) -> BatchedSteps[Tensor]:
        """Computes the rows of the frontier nodes, which are all of one level."""
        nodes, state = tree.frontier, (yield from self.sequence.begin())
        start = state.cached
        visible = np.zeros((len(nodes), start + len(nodes)), dtype=bool)
        visible[:, : self._committed] = True
        for i, node in enumerate(nodes):
            above = self._ancestors[tree.parents[node]]
            self._ancestors[node] = path = [*above, start + i]
            self._columns[above[-1] if above else -1, tree.tokens[node]] = start + i
            visible[i, path] = True
        tokens = [tree.tokens[node] for node in nodes]
        mask, positions = torch.from_numpy(visible), [self._committed + tree.level - 1] * len(nodes)
        request = ForwardRequest(state, tokens, len(nodes), mask, positions)
        score = yield BatchedCall(self.model.forward_batch, request)
        self.passes += 1
        return score.logits

    def _keep_accepted(self, state: SequenceState, tokens: list[int]) -> None:
        """Keeps the cached nodes of the last round on the path of the tokens committed since.

        tokens: without the last one, which is computed again because its row is needed.
        """
        if not self._columns:
            return
        column, kept = -1, []
        for token in tokens:
            child = self._columns.get((column, token))
            if child is None:
                break
            column = child
            kept.append(child)
        self.model.keep_columns(state, kept, prefix=self._committed)


class SlotRows:
    """Rows of a block drafter: one forward pass for a tree of any depth; slot l predicts level l.

    With previous-token features, a node's row also depends on its token. A shape with `likeliest`
    tokens gets these and their log-probabilities (`Tree.choose`), any other shape logits.
    """

    def __init__(
        self, drafter: Drafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.session: SlotSession = drafter.open(source, sampling, randomness)
        self.longest, self.passes = self.session.longest, 1
        self._states = self._logits = torch.empty(0)
        self._likely: LikelyTokens | None = None
        """None if the shape needs full rows."""

    def first(
        self, tokens: Tensor, levels: int, likeliest: Likeliest | None
    ) -> BatchedSteps[Tensor | tuple[Array, Array]]:
        session, self._likely = self.session, None
        self._states, self._logits = yield from session.slot_rows(tokens, levels)
        before = session.token_before(tokens)
        if likeliest is not None:
            self._likely = LikelyTokens(self._states, self._logits, likeliest, session.correction)
        return self._after(0, [before])

    def below(self, tree: Tree) -> BatchedSteps[Tensor | tuple[Array, Array]]:
        yield from ()  # no call: the slots are computed already
        return self._after(tree.level, [tree.tokens[node] for node in tree.frontier])

    def _after(self, level: int, previous: list[int]) -> Tensor | tuple[Array, Array]:
        if self._likely is not None:
            return self._likely.after(level, previous)
        nodes, correction = len(previous), self.session.correction
        states = self._states[level].expand(nodes, -1)
        logits = self._logits[level].expand(nodes, -1)
        if correction is not None:
            logits = correction.after(states, logits, torch.tensor(previous, device=logits.device))
        return logits


class SeveralSessions:
    """One session per drafter."""

    def __init__(
        self, drafter: SeveralDrafters, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.sessions = [one.open(source, sampling, randomness) for one in drafter.drafters]

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        proposals = []
        for session in self.sessions:
            proposal = yield from as_steps(session.propose(tokens, target_state, stop))
            if len(proposal.tokens) > 0:
                proposals.append(proposal)
        return Proposal.side_by_side(proposals) if proposals else Proposal.empty()


class SeveralDrafters(Drafter):
    """Paths of several tree drafters below the same root (SpecInfer's several small models).

    Each root keeps the distribution of the drafter that it was drawn from.
    """

    session = SeveralSessions
    provides: frozenset[Evidence] = frozenset()
    drafts_trees = True

    def __init__(self, drafters: Sequence[TreeDrafter]) -> None:
        self.drafters = drafters
        self.name = "+".join(drafter.name for drafter in drafters)
        self.requires = TargetRequirements.union(drafter.requires for drafter in drafters)

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "independent"
