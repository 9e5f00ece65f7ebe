"""How draft trees grow: which children the nodes of a level get.

A shape plants a `Growth` for each round. The growth is handed the drafter's rows below the nodes
that were fed last, adds their children, and says which of these are to be fed next: those whose
children may still enter the tree. Every random choice goes through `Randomness`. Shapes that draw
(`drawn_shapes`) keep the rows they drew from, for rejection; shapes that choose (`chosen_shapes`)
make point masses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy.typing as npt
import torch
from torch import Tensor

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.types import Proposal, Sampling

Array = npt.NDArray
ROOT = -1
"""The last committed token, which roots hang from."""

Judge = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Predicted acceptance of M candidates: states [F, D] and logits [F, V] of the level's rows, each
candidate's row [M] and token [M] -> [M]."""


@dataclass
class Tree:
    """A tree under way: nodes in the order they were added, parents first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    draft_probs: list[Tensor] = field(default_factory=list)
    known: int = 0
    """Rows in draft_probs."""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, row: int = 0) -> int:
        """Index of the new node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)
        self.rows.append(row)
        return len(self.tokens) - 1

    def add_level(self, tokens: list[int], parents: list[int]) -> None:
        """Several nodes of one level, as point masses."""
        depth = self.depths[parents[0]] + 1 if parents and parents[0] >= 0 else 1
        self.tokens += tokens
        self.parents += parents
        self.depths += [depth] * len(tokens)
        self.rows += [0] * len(tokens)

    def add_rows(self, draft_probs: Tensor) -> int:
        """Keep rows that tokens are about to be drawn from; the number of the first. [F, V]."""
        self.draft_probs.append(draft_probs)
        self.known += len(draft_probs)
        return self.known - len(draft_probs)

    def drawn(self, draw_kind: DrawKind, passes: int, counts: list[int] | None = None) -> Proposal:
        """The tree with the rows it was drawn from."""
        return Proposal(
            tokens=torch.tensor(self.tokens, dtype=torch.long),
            parents=torch.tensor(self.parents, dtype=torch.long),
            draw_kind=draw_kind,
            draft_probs=torch.cat(self.draft_probs),
            rows=torch.tensor(self.rows, dtype=torch.long),
            counts=None if counts is None else torch.tensor(counts),
            passes=passes,
        )

    def chosen(self, nodes: Sequence[int], passes: int, expected: float | None = None) -> Proposal:
        """Some nodes in rising order, all their ancestors among them, as point masses."""
        place = {node: i for i, node in enumerate(nodes)}
        return Proposal(
            torch.tensor([self.tokens[node] for node in nodes], dtype=torch.long),
            torch.tensor([place.get(self.parents[node], ROOT) for node in nodes]),
            passes=passes,
            expected=expected,
        )


class Growth(Protocol):
    """One round's tree, growing level by level."""

    tree: Tree
    expected: list[float]
    """Expected accepted tokens after each level, where the shape works them out."""

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        """Add the children of the nodes fed last; those of them that are to be fed next.

        Shapes: logits [F, V], hidden [F, D]: what the drafter says below each node that was fed,
        the last committed token in the first call.
        """
        ...

    def proposal(self, passes: int) -> Proposal:
        """The tree as grown so far, by so many drafter calls."""
        ...


class Shape(Protocol):
    """A kind of tree."""

    name: str
    draw_kind: DrawKind
    branches: bool
    estimates: bool
    """Whether `Growth.expected` is worked out, for stop policies that go by it."""
    widest: int
    """Most siblings that it is bound to ask for."""
    deepest: int | None
    """Levels that it ends at; None: it has as many as are asked for."""

    def plant(self, sampling: Sampling, randomness: Randomness, ends: Collection[int]) -> Growth:
        """A tree for one round; tokens in `ends` get no children."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """A growth that may be given the likeliest tokens alone, in place of whole rows."""

    likeliest: tuple[int, Sequence[float]] | None
    """How many of each row, and the temperatures of their log-probabilities by level (`of_level`);
    None: whole rows."""

    def choose(self, tokens: Array, log_probs: Array) -> list[int]:
        """As `grow`. Shapes: tokens [F, C], log_probs [F, C] below each node that was fed."""
        ...


def of_level(temperatures: Sequence[float], level: int) -> float:
    """That of a level, counted from 0; the last one's of all below it."""
    return temperatures[min(level, len(temperatures) - 1)]


def check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value} of a draft tree must be at least 1")
