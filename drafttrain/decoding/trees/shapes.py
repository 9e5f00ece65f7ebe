"""How draft trees grow: which children the nodes of a level get.

A round's `Tree` is handed the drafter's rows below the nodes that were fed last. Its shape adds
their children and says which nodes are to be fed next: those whose children may still enter the
tree. Every random choice goes through `Randomness`. Shapes that draw (`drawn`) keep the rows that
they drew from, for rejection; shapes that choose (`chosen`, `fixed`) make point masses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import NotFinite, Proposal, Sampling

Array = npt.NDArray
ROOT = -1
"""The last committed token, which roots hang from."""

Likeliest = tuple[int, Sequence[float]]
"""How many tokens of each row, and the temperatures of their log-probabilities by level
(`temperature_at`)."""


class Shape(Protocol):
    """A kind of tree. Most are all that this says; each has a `grow` of its own."""

    name: str
    draw_kind: DrawKind = "deterministic"
    drafts_trees: bool = True
    estimates: bool = False
    """Whether `Tree.expected` is worked out, for stop policies that go by it."""
    widest: int = 1
    """Most siblings that it is bound to ask for."""
    deepest: int | None = None
    """Levels that it ends at; None: it has as many as are asked for."""

    def new_tree(self, sampling: Sampling, randomness: Randomness, ends: Collection[int]) -> Tree:
        """A tree for one round; tokens in `ends` get no children."""
        return Tree(self, sampling, randomness, ends)

    def likeliest(self, sampling: Sampling) -> Likeliest | None:
        """The likeliest tokens that do in place of whole rows (`choose`); None: whole rows."""
        return None

    def grow(self, tree: Tree, logits: Tensor) -> Sequence[int]:
        """`Tree.grow`, of nodes that may end a sequence too."""
        ...

    def choose(self, tree: Tree, tokens: Array, log_probs: Array) -> Sequence[int]:
        """`Tree.choose`, likewise."""
        raise NotImplementedError(f"{self.name} grows over whole rows")

    def kept(self, tree: Tree) -> Sequence[int]:
        """The nodes of a chosen tree in rising order, all their ancestors among them."""
        return range(len(tree.tokens))


class Tree:
    """A tree under way: nodes in the order they were added, parents first."""

    def __init__(
        self, shape: Shape, sampling: Sampling, randomness: Randomness, ends: Collection[int]
    ) -> None:
        self.shape, self.sampling, self.randomness, self.ends = shape, sampling, randomness, ends
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: list[int] = []
        """Of each node the row of `draft_probs` that it was drawn from."""
        self.notes: list[Any] = []
        """Of each node what its shape goes by: scores, ranks, or how many paths go through it."""
        self.draft_probs: list[Tensor] = []
        self.expected: list[float] = []
        """Expected accepted tokens after each level, where the shape estimates them."""
        self.level = 0
        """Levels so far."""
        self.frontier = [ROOT]
        """The nodes whose children come next."""

    def add(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        notes: Sequence[Any],
        rows: Sequence[int] = (),
    ) -> range:
        """New nodes of a level; rows: those of drawn ones."""
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += parents
        self.notes += notes
        self.rows += rows
        return range(first, len(self.tokens))

    def frontier_notes(self, root: Any) -> list[Any]:
        """The notes of the nodes that were fed, `root` of the last committed token."""
        return [root if node == ROOT else self.notes[node] for node in self.frontier]

    def keep_probs(self, logits: Tensor) -> tuple[Tensor, int]:
        """The rows that children are drawn from, which are kept, and the number of the first.
        Shapes: [F, V] -> [F, V]."""
        known, probs = sum(map(len, self.draft_probs)), warp(logits, self.sampling)
        check_not_nan(probs)
        self.draft_probs.append(probs)
        return probs, known

    def grow(self, logits: Tensor) -> list[int]:
        """Add the children of the nodes fed last; those of them that are to be fed next.

        Shapes: logits [F, V]: the drafter's rows below each node that was fed, the last committed
        token in the first call.
        """
        return self._set_frontier(self.shape.grow(self, logits))

    def choose(self, tokens: Array, log_probs: Array) -> list[int]:
        """As `grow`, by the likeliest tokens. Shapes: tokens [F, C], log_probs [F, C]."""
        check_not_nan(log_probs)
        return self._set_frontier(self.shape.choose(self, tokens, log_probs))

    def _set_frontier(self, nodes: Sequence[int]) -> list[int]:
        self.level += 1
        self.frontier = [node for node in nodes if self.tokens[node] not in self.ends]
        return self.frontier

    def proposal(self, passes: int) -> Proposal:
        """The tree as grown so far, by so many drafter calls."""
        kind = self.shape.draw_kind
        if kind != "deterministic":
            return Proposal(
                torch.tensor(self.tokens, dtype=torch.long),
                torch.tensor(self.parents, dtype=torch.long),
                kind,
                torch.cat(self.draft_probs),
                torch.tensor(self.rows, dtype=torch.long),
                torch.tensor(self.notes) if kind == "iid" else None,
                passes,
            )
        nodes = np.asarray(self.shape.kept(self), dtype=np.int64)
        parents = np.array(self.parents, dtype=np.int64)[nodes]
        places = np.where(parents == ROOT, ROOT, np.searchsorted(nodes, parents))
        return Proposal(
            torch.from_numpy(np.array(self.tokens, dtype=np.int64)[nodes]),
            torch.from_numpy(places),
            passes=passes,
            expected=self.expected[-1] if self.expected else None,
        )


def temperature_at(temperatures: Sequence[float], level: int) -> float:
    """That of a level, counted from 0; the last one's of all below it."""
    return temperatures[min(level, len(temperatures) - 1)]


def check_not_nan(probs: Tensor | Array) -> None:
    """Raise NotFinite for a row [F, V] that a softmax made of scores that are not finite: all of it
    is NaN then."""
    if True in (probs[:, 0] != probs[:, 0]).tolist():
        raise NotFinite.of_drafter()


def check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value} of a draft tree must be at least 1")
