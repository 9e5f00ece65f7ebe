"""Draft trees: a shape says which children a level gets, a source of rows says what follows them.

Rows come from a language model with its own tree cache, one call a level, or from slots whose rows
are there at once, one pass for the whole tree. Nothing else differs between RSD, SpecTr, SpecInfer,
OPT-Tree and fixed trees over either of them.
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
from drafttrain.decoding.drafters.candidates import TREE_CANDIDATES, LikelyTokens
from drafttrain.decoding.drafters.causal import CausalDrafter, DrafterSequence
from drafttrain.decoding.drafters.slots import SlotSession
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.roles import Drafter, DraftSession, Randomness, StopPolicy
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.trees.shapes import Array, Likeliest, Shape, Tree
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source


class GrowingDrafter(Drafter, Protocol):
    """A drafter whose kind has rows that trees can grow over."""

    vocabulary: int
    eos_ids: frozenset[int]


class TreeDrafter(Drafter):
    """Drafts trees of one shape, with a drafter of a kind that has rows for them.

    draft_temperature: that of the rows tokens are drawn from; None: the target's. Shapes that
    choose have their own. Raises ValueError for a model that cannot be given branches, and for a
    tree with more siblings than the vocabulary has tokens.
    """

    def __init__(
        self,
        drafter: GrowingDrafter,
        shape: Shape,
        draft_temperature: float | None = None,
    ) -> None:
        self.drafter, self.shape = drafter, shape
        self.kind = KINDS[drafter.name]
        self.draft_temperature = draft_temperature
        self.name = shape.name
        if self.kind.is_language_model:
            drafter.model.check_tree_attention()
        else:
            self.name = f"{drafter.name} {shape.name}"
        self.requires, self.drafts_trees = drafter.requires, shape.drafts_trees
        check_width(shape, drafter.vocabulary)

    @property
    def provides(self) -> frozenset[Evidence]:
        return frozenset({"expected"} if self.shape.estimates else ())

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return self.shape.draw_kind

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> TreeSession:
        """Open a session. Raises ValueError for a source longer than the drafter's positions."""
        if self.draft_temperature is not None:
            sampling = replace(sampling, temperature=self.draft_temperature)
        assert self.kind.tree_rows is not None
        rows = resolve_name(self.kind.tree_rows)(self.drafter, source, sampling, randomness)
        return TreeSession(rows, self.shape, sampling, randomness, self.drafter.eos_ids)


def check_width(shape: Shape, vocabulary: int) -> None:
    """Refuse a shape with more siblings than there are tokens. Raises ValueError."""
    if shape.widest > vocabulary:
        raise ValueError(
            f"tree {shape.name!r} asks for {shape.widest} siblings, but the drafter's "
            f"vocabulary has {vocabulary} tokens; make the tree narrower"
        )


class TreeSession:
    """One sequence: its rows' cache is all that is kept between rounds."""

    def __init__(
        self,
        rows: ModelRows | SlotRows,
        shape: Shape,
        sampling: Sampling,
        randomness: Randomness,
        ends: frozenset[int],
    ) -> None:
        self.rows, self.shape, self.ends = rows, shape, ends
        self.sampling, self.randomness = sampling, randomness

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        longest = self.rows.longest(tokens, stop.longest, target_state)
        if longest == 0 or not stop.should_draft(DraftState(0)):
            return Proposal.empty()
        tree = self.shape.new_tree(self.sampling, self.randomness, self.ends)
        likeliest = self.shape.likeliest(self.sampling)
        found = yield from self.rows.first(tokens, longest, likeliest)
        while True:
            fed = tree.choose(*found) if self.rows.has_top_tokens else tree.grow(found)
            if not fed or tree.level == longest:
                break
            if not stop.should_draft(DraftState(tree.level, expected=tree.expected)):
                break
            found = yield from self.rows.below(tree)
        return tree.proposal(self.rows.passes)


class ModelRows:
    """Rows of a language model. A level is one call; nodes see their ancestors only.

    Nodes that were fed and then accepted stay cached for the next round.
    """

    has_top_tokens = False

    def __init__(
        self, drafter: CausalDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.model = drafter.model
        self.sequence = DrafterSequence(drafter.model, source)
        self.passes = 0
        """Sequential calls of this round so far."""
        self._committed = 0
        self._ancestors: dict[int, list[int]] = {}
        """Of each fed node: the columns of its ancestors in the tree and its own."""
        self._columns: dict[tuple[int, int], int] = {}
        """(column of the parent, token) -> column, the parent's -1 where it is committed."""

    def longest(self, tokens: Tensor, wanted: int, target_state: TargetState | None) -> int:
        """Levels that can be drafted after these tokens, at most as many as wanted."""
        return self.sequence.longest(wanted, len(self.sequence.tokens(tokens)))

    def first(
        self, tokens: Tensor, levels: int, likeliest: Likeliest | None
    ) -> BatchedSteps[Tensor]:
        """The row after all committed tokens [T]: what `Tree.grow` is handed."""
        tokens, state = self.sequence.tokens(tokens), (yield from self.sequence.begin())
        self._keep_accepted(state, tokens[self._committed : -1].tolist())
        score = yield BatchedCall(self.model.extend_caches, (state, tokens))
        self._committed = len(tokens)
        self._ancestors, self._columns = {-1: []}, {}
        self.passes = 1
        return score.logits

    def below(self, tree: Tree) -> BatchedSteps[Tensor]:
        """The same below the nodes that are to be fed, all of one level."""
        nodes, state = tree.frontier, (yield from self.sequence.begin())
        start = state.cached
        visible = np.zeros((len(nodes), start + len(nodes)), dtype=bool)
        visible[:, : self._committed] = True
        for i, node in enumerate(nodes):
            above = self._ancestors[tree.parents[node]]
            self._ancestors[node] = line = [*above, start + i]
            self._columns[above[-1] if above else -1, tree.tokens[node]] = start + i
            visible[i, line] = True
        position = self._committed + tree.level - 1
        tokens = torch.tensor([tree.tokens[node] for node in nodes])
        positions = torch.full((len(nodes),), position)
        score = yield BatchedCall(
            self.model.extend_trees, (state, tokens, torch.from_numpy(visible), positions)
        )
        self.passes += 1
        return score.logits

    def _keep_accepted(self, state: SequenceState, tokens: list[int]) -> None:
        """Of the last round's nodes, keep the path that was committed since, these tokens; the last
        one is fed anew in any case, since its row is needed."""
        if not self._columns:
            return
        column, kept = -1, []
        for token in tokens:
            below = self._columns.get((column, token))
            if below is None:
                break
            column = below
            kept.append(below)
        self.model.keep_columns(state, kept, behind=self._committed)


class SlotRows:
    """Rows of slots that are there at once: one pass, whatever the depth.

    Level l is predicted by slot l; where slots are linked, each node's row follows from the token
    before it. A shape that chooses gets the likeliest tokens of its slots.
    """

    def __init__(
        self, drafter: Drafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.session: SlotSession = drafter.open(source, sampling, randomness)
        self.passes = 1
        self._states = self._logits = torch.empty(0)
        self._likely: LikelyTokens | None = None
        """None where whole rows are wanted."""

    @property
    def has_top_tokens(self) -> bool:
        """Whether tokens and their log-probabilities are found (`Tree.choose`), not whole rows."""
        return self._likely is not None

    def longest(self, tokens: Tensor, wanted: int, target_state: TargetState | None) -> int:
        return self.session.longest(tokens, wanted, target_state)

    def first(
        self, tokens: Tensor, levels: int, likeliest: Likeliest | None
    ) -> BatchedSteps[Tensor | tuple[Array, Array]]:
        session, self._likely = self.session, None
        self._states, self._logits = yield from session.slot_rows(tokens, levels)
        before = session.token_before(tokens)
        if likeliest is not None:
            count, temperatures = likeliest
            if session.correction is not None:
                count = max(count, TREE_CANDIDATES)
            wanted = count, temperatures
            self._likely = LikelyTokens(self._states, self._logits, wanted, session.correction)
        return self._after(0, [before])

    def below(self, tree: Tree) -> BatchedSteps[Tensor | tuple[Array, Array]]:
        yield from ()  # the rows are there already
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


class SeveralDrafters(Drafter):
    """Trees of several drafters side by side (SpecInfer's many small models).

    Each sibling below the last committed token carries the row of the drafter it came from.
    """

    provides: frozenset[Evidence] = frozenset()
    drafts_trees = True

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if len(drafters) < 2:
            raise ValueError("several drafters are needed; give one more, or use it alone")
        self.drafters = drafters
        self.name = "+".join(drafter.name for drafter in drafters)
        self.requires = TargetRequirements.union(drafter.requires for drafter in drafters)

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        """Raises ValueError for drafters whose drafts are not independent draws."""
        for drafter in self.drafters:
            if drafter.draw_kind(sampling) not in ("iid", "independent"):
                raise ValueError(
                    f"drafter {drafter.name!r} makes {drafter.draw_kind(sampling)} drafts, but "
                    "only independent draws of several drafters can be verified together; use paths"
                )
        return "independent"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> SeveralSessions:
        return SeveralSessions([d.open(source, sampling, randomness) for d in self.drafters])


class SeveralSessions:
    """A session of each drafter."""

    def __init__(self, sessions: Sequence[DraftSession]) -> None:
        self.sessions = sessions

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        found = []
        for session in self.sessions:
            proposal = (yield from as_steps(session.propose(tokens, target_state, stop))).on_host()
            if len(proposal.tokens) > 0:
                found.append(proposal)
        return Proposal.side_by_side(found) if found else Proposal.empty()
