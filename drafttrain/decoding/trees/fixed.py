"""Fixed trees: the same shape every round, filled with the drafter's likeliest tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.trees.shapes import ROOT, Array, Growth, Tree, check_positive
from drafttrain.decoding.types import Proposal, Sampling


@dataclass(frozen=True)
class Fixed:
    """The same tree every round, given by the ranks of its tokens in the drafter's rows.

    Each node is the tuple of ranks on its path, 0 the drafter's first choice: (0,), (1,), (0, 0).
    """

    paths: frozenset[tuple[int, ...]]
    kind: str = "fixed"
    draw_kind: DrawKind = "deterministic"
    estimates = False

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in self.paths):
                raise ValueError(
                    f"path {path} of a fixed tree needs ranks of 0 or more and its beginning "
                    f"{path[:-1]} in the tree; add it"
                )
        check_positive("nodes", len(self.paths))

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
    def branches(self) -> bool:
        return len(self.paths) > self.deepest

    def plant(self, sampling: Sampling, randomness: Randomness, ends: Collection[int]) -> Growth:
        return FixedGrowth(self.paths, ends)


class FixedGrowth:
    """Ranks to tokens, level by level."""

    def __init__(self, paths: frozenset[tuple[int, ...]], ends: Collection[int]) -> None:
        self.tree, self.expected, self.ends = Tree(), [], ends
        self._below: dict[tuple[int, ...], list[int]] = {}
        for path in sorted(paths):
            self._below.setdefault(path[:-1], []).append(path[-1])
        self._fed: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
        self.likeliest = (1 + max(ranks[-1] for ranks in self._below.values()), (1.0,))

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        widest = 1 + max(self._below[path][-1] for _, path in self._fed)
        return self._add(logits.topk(min(widest, logits.shape[-1]), dim=-1).indices.tolist())

    def choose(self, tokens: Array, log_probs: Array) -> list[int]:
        order = np.argsort(-log_probs, axis=1, kind="stable")
        return self._add(np.take_along_axis(tokens, order, axis=1).tolist())

    def _add(self, by_rank: list[list[int]]) -> list[int]:
        """Children by the ranks of the tokens below each node that was fed."""
        fed = []
        for (parent, path), tokens in zip(self._fed, by_rank, strict=True):
            for rank in self._below[path]:
                if rank >= len(tokens):
                    break
                node = self.tree.add(tokens[rank], parent)
                if (*path, rank) in self._below and tokens[rank] not in self.ends:
                    fed.append((node, (*path, rank)))
        self._fed = fed
        return [node for node, _ in fed]

    def proposal(self, passes: int) -> Proposal:
        return self.tree.chosen(range(len(self.tree)), passes)


def binary_tree(nodes: int) -> Fixed:
    """Two children a node, filled level by level: a baseline of OPT-Tree."""
    paths: list[tuple[int, ...]] = [(0,), (1,)]
    for path in paths:
        if len(paths) >= nodes:
            break
        paths += [(*path, 0), (*path, 1)]
    return Fixed(frozenset(paths[:nodes]), "binary")


EAGLE_PATHS = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)
"""EAGLE's tree of 25 nodes (Li et al. 2024), a digit a rank."""


def eagle_tree() -> Fixed:
    """The fixed tree of EAGLE, a baseline of OPT-Tree."""
    return Fixed(frozenset(tuple(map(int, path)) for path in EAGLE_PATHS.split()), "eagle")


def best_fixed_tree(by_rank: Sequence[float], nodes: int, depth: int) -> Fixed:
    """The fixed tree that expects the most accepted tokens, from acceptance by rank (Sequoia).

    by_rank[r]: how often the target's token is the drafter's choice number r. If that holds at
    every node alike, a node is reached with the product of its ranks' acceptances; the n largest
    products make the best tree (Chen et al. 2024 find the same by dynamic programming).
    """
    check_positive("nodes", nodes)
    check_positive("depth", depth)
    if not by_rank or min(by_rank) < 0.0 or sum(by_rank) > 1.0 + 1e-9:
        raise ValueError(
            f"by_rank = {list(by_rank)} must hold shares of the rows, of 0 or more, that sum to "
            "1 at most"
        )
    chosen: list[tuple[int, ...]] = []
    open_: list[tuple[float, tuple[int, ...]]] = [(by_rank[r], (r,)) for r in range(len(by_rank))]
    while open_ and len(chosen) < nodes:
        value, path = best = max(open_, key=lambda entry: (entry[0], -len(entry[1])))
        open_.remove(best)
        chosen.append(path)
        if len(path) < depth:
            open_ += [(value * p, (*path, r)) for r, p in enumerate(by_rank)]
    return Fixed(frozenset(chosen), "sequoia")
