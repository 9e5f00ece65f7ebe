"""How draft trees grow: which children the nodes of a level get.

A `Tree` grows level by level. It gets the drafter's rows for its frontier, the nodes whose children
come next; its shape adds these children and returns the next frontier: new nodes whose children may
enter the tree. Shapes that draw tokens (`drawn`) keep the distributions for rejection sampling;
shapes that choose tokens (`chosen`, `fixed`) make point masses.
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
"""Parent of the roots: the last committed token."""

Likeliest = tuple[int, float]
"""Number of top tokens of each row, and the temperature of their log-probabilities."""


class Shape(Protocol):
    """A kind of tree, with the defaults that most kinds share."""

    name: str
    draw_kind: DrawKind = "deterministic"
    drafts_trees: bool = True
    estimates: bool = False
    """Whether it computes `Tree.expected`, which stop policies can use."""
    widest: int = 1
    """Number of siblings that the vocabulary must allow."""
    deepest: int | None = None
    """Most levels; None: as many as the stop policy allows."""

    def likeliest(self, sampling: Sampling) -> Likeliest | None:
        """Returns which top tokens are enough for `choose`; None if `grow` needs full rows."""
        return None

    def grow(self, tree: Tree, logits: Tensor) -> Sequence[int]:
        """Adds the children for `Tree.grow`; the result may hold nodes that end the sequence."""

    def choose(self, tree: Tree, tokens: Array, log_probs: Array) -> Sequence[int]:
        """Same for `Tree.choose`; only for shapes with `likeliest` tokens."""

    def kept(self, tree: Tree) -> Sequence[int]:
        """Returns the nodes to propose in rising order, with all their ancestors."""
        return range(len(tree.tokens))


class Tree:
    """The growing tree of one round: nodes in the order they were added, parents first.

    Tokens in `ends` get no children.
    """

    def __init__(
        self, shape: Shape, sampling: Sampling, randomness: Randomness, ends: Collection[int]
    ) -> None:
        self.shape, self.sampling, self.randomness, self.ends = shape, sampling, randomness, ends
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: list[int] = []
        """Row of `draft_probs`, if nodes are drawn, that each node was drawn from."""
        self.notes: list[Any] = []
        """Data of the shape for each node: scores, ranks, or the number of paths through it."""
        self.draft_probs: list[Tensor] = []
        self.expected: list[float] = []
        """Expected number of accepted tokens after each level, if the shape estimates it."""
        self.level = 0
        """Number of levels so far."""
        self.frontier = [ROOT]

    def add(self, tokens: Sequence[int], rows: Sequence[int], notes: Sequence[Any]) -> range:
        """Adds nodes of a level; returns their indices. rows: frontier index of each parent."""
        first, first_row = len(self.tokens), sum(map(len, self.draft_probs[:-1]))
        self.tokens += tokens
        self.parents += [self.frontier[row] for row in rows]
        self.notes += notes
        self.rows += [first_row + row for row in rows]
        return range(first, len(self.tokens))

    def frontier_notes(self, root: Any) -> list[Any]:
        """Returns the notes of the frontier nodes, `root` for the last committed token."""
        return [root if node == ROOT else self.notes[node] for node in self.frontier]

    def keep_probs(self, logits: Tensor) -> Tensor:
        """Warps rows to draw children from and keeps them. Shapes: [F, V] -> [F, V]."""
        probs = warp(logits, self.sampling)
        check_not_nan(probs)
        self.draft_probs.append(probs)
        return probs

    def grow(self, logits: Tensor) -> list[int]:
        """Adds the children of the frontier; returns the next frontier.

        Shapes: logits [F, V], the drafter's row for each frontier node.
        """
        return self._set_frontier(self.shape.grow(self, logits))

    def choose(self, tokens: Array, log_probs: Array) -> list[int]:
        """Same as `grow`, from top tokens. Shapes: tokens [F, C], log_probs [F, C]."""
        check_not_nan(log_probs)
        return self._set_frontier(self.shape.choose(self, tokens, log_probs))

    def _set_frontier(self, nodes: Sequence[int]) -> list[int]:
        self.level += 1
        self.frontier = [node for node in nodes if self.tokens[node] not in self.ends]
        return self.frontier

    def proposal(self, passes: int) -> Proposal:
        """Returns the tree so far as a proposal that took `passes` drafter calls."""
        kind, is_drawn = self.shape.draw_kind, bool(self.draft_probs)
        nodes = np.asarray(self.shape.kept(self), dtype=np.int64)
        parents = np.array(self.parents, dtype=np.int64)[nodes]
        parents = np.where(parents == ROOT, ROOT, np.searchsorted(nodes, parents))
        return Proposal(
            torch.from_numpy(np.array(self.tokens, dtype=np.int64)[nodes]),
            torch.from_numpy(parents),
            kind,
            torch.cat(self.draft_probs) if is_drawn else None,
            torch.tensor(self.rows, dtype=torch.long) if is_drawn else None,
            torch.tensor(self.notes) if kind == "iid" else None,
            passes,
            expected=self.expected[-1] if self.expected else None,
        )


def check_not_nan(probs: Tensor | Array) -> None:
    """Raises NotFinite if a row of softmax results [F, V] is NaN.

    Checks the first column: a softmax over scores that are not finite is NaN in all of its row.
    """
    if True in (probs[:, 0] != probs[:, 0]).tolist():
        raise NotFinite.of_drafter()
