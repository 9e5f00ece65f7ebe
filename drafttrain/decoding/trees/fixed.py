"""Fixed trees: the same shape in each round, filled with the drafter's likeliest tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from drafttrain.decoding.trees.shapes import Array, Likeliest, Shape, Tree
from drafttrain.decoding.types import NOT_FINITE, NotFinite, Sampling


@dataclass(frozen=True)
class Fixed(Shape):
    """A tree given by the ranks of its tokens in the drafter's rows.

    Each node is the tuple of ranks on its path, with rank 0 for the arg-max: (0,), (1,), (0, 0).
    """

    paths: frozenset[tuple[int, ...]]
    kind: str = "fixed"

    @property
    def widest(self) -> int:
        return 1 + max(rank for path in self.paths for rank in path)

    @property
    def deepest(self) -> int:
        return max(map(len, self.paths))

    @property
    def name(self) -> str:
        return f"{self.kind}({len(self.paths)})"

    @property
    def drafts_trees(self) -> bool:
        return len(self.paths) > self.deepest

    def likeliest(self, sampling: Sampling) -> Likeliest:
        return self.widest, 1.0

    def grow(self, tree: Tree, logits: Tensor) -> list[int]:
        ranks = [rank for path in tree.frontier_notes(()) for rank in self._below[path]]
        best = logits.topk(min(1 + max(ranks), logits.shape[-1]), dim=-1)
        finite = best.values[:, :1].isfinite()
        by_rank = best.indices.where(finite, NOT_FINITE).tolist()  # one device synchronisation
        if any(NOT_FINITE in row for row in by_rank):
            raise NotFinite.of_drafter()
        return self._add(tree, by_rank)

    def choose(self, tree: Tree, tokens: Array, log_probs: Array) -> list[int]:
        order = np.argsort(-log_probs, axis=1, kind="stable")
        return self._add(tree, np.take_along_axis(tokens, order, axis=1).tolist())

    @cached_property
    def _below(self) -> dict[tuple[int, ...], list[int]]:
        """Ranks of the children of each inner node; () is the root."""
        below: dict[tuple[int, ...], list[int]] = {}
        for path in sorted(self.paths):
            below.setdefault(path[:-1], []).append(path[-1])
        return below

    def _add(self, tree: Tree, by_rank: list[list[int]]) -> list[int]:
        """Adds the children of the frontier; by_rank: tokens of each row, most likely first."""
        children = [
            (tokens[rank], row, (*path, rank))
            for row, (path, tokens) in enumerate(zip(tree.frontier_notes(()), by_rank, strict=True))
            for rank in self._below[path]
            if rank < len(tokens)
        ]
        added = tree.add(*map(list, zip(*children, strict=True)))
        return [node for node in added if tree.notes[node] in self._below]


def binary_tree(nodes: int) -> Fixed:
    """Binary tree filled level by level, a baseline of OPT-Tree."""
    paths: list[tuple[int, ...]] = [(0,), (1,)]
    for path in paths:  # grows while it is read, level by level
        if len(paths) >= nodes:
            break
        paths += [(*path, 0), (*path, 1)]
    return Fixed(frozenset(paths[:nodes]), "binary")


EAGLE_PATHS = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)
"""EAGLE's tree of 25 nodes (Li et al. 2024); each digit is a rank."""


def eagle_tree() -> Fixed:
    """The fixed tree of EAGLE, a baseline of OPT-Tree."""
    return Fixed(frozenset(tuple(map(int, path)) for path in EAGLE_PATHS.split()), "eagle")


def best_fixed_tree(by_rank: Sequence[float], nodes: int, depth: int) -> Fixed:
    """The fixed tree with the most expected accepted tokens, from acceptance by rank (Sequoia).

    by_rank[r]: fraction of rows in which the target's token has rank r. If it is the same at every
    node, a node is accepted with the product over the ranks on its path; the n nodes with the
    largest products form the best tree (Chen et al. 2024 find it by dynamic programming).
    """
    if not by_rank or min(by_rank) < 0.0 or sum(by_rank) > 1.0 + 1e-9:
        raise ValueError(
            f"by_rank = {list(by_rank)} must hold fractions of 0 or more that sum to 1 at most"
        )
    chosen: list[tuple[int, ...]] = []
    candidates: list[tuple[float, tuple[int, ...]]] = [(p, (r,)) for r, p in enumerate(by_rank)]
    while candidates and len(chosen) < nodes:
        value, path = best = max(candidates, key=lambda entry: (entry[0], -len(entry[1])))
        candidates.remove(best)
        chosen.append(path)
        if len(path) < depth:
            candidates += [(value * p, (*path, r)) for r, p in enumerate(by_rank)]
    return Fixed(frozenset(chosen), "sequoia")
