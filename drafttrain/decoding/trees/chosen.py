"""Tree shapes whose nodes are chosen by the drafter's probabilities: OPT-Trees, the best chain, and
fixed trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import exact_enough, warp
from drafttrain.decoding.trees.shapes import (
    ROOT,
    Array,
    Growth,
    Judge,
    Tree,
    check_positive,
    of_level,
)
from drafttrain.decoding.types import Proposal, Sampling

Temperatures = tuple[float, ...] | None
"""Of the rows that nodes are scored by, of each level, the last one's of all below it; None: the
target's, or `GREEDY_SCORES`."""


@dataclass(frozen=True)
class Optimal:
    """The tree of n nodes that expects to have the most accepted (OPT-Tree, Wang et al. 2025).

    A node's score is the product of the draft probabilities on its path: how likely the target is
    believed to go there. The n largest products of all make up a tree, and their sum E(A) is the
    expected number of accepted tokens. With a judge, draft probabilities are replaced by
    q P, the part min(q, p) of the target's probability that an acceptance head predicts.
    """

    nodes: int
    judge: Judge | None = None
    draft_temperature: Temperatures = None
    draw_kind: DrawKind = "deterministic"
    estimates = True
    widest = 1
    deepest = None

    def __post_init__(self) -> None:
        check_positive("nodes", self.nodes)

    @property
    def name(self) -> str:
        return f"opt-tree({self.nodes}{',head' if self.judge else ''})"

    @property
    def branches(self) -> bool:
        return self.nodes > 1

    def plant(self, sampling: Sampling, randomness: Randomness, ends: Collection[int]) -> Growth:
        return OptimalGrowth(self.nodes, sampling, ends, self.judge, self.draft_temperature)


@dataclass(frozen=True)
class OptimalChain:
    """The chain that expects to have the most accepted, of those that a beam finds (ours).

    A chain of tokens whose paths have the products q_1, q_2, ... expects sum_i q_i accepted ones,
    as the nodes of `Optimal` do; the chain of the likeliest token after each is often not the best,
    as a token that is a little less likely may be followed by surer ones. A level keeps the `width`
    likeliest paths; with all of them the chain would be the best of all.
    """

    width: int
    judge: Judge | None = None
    draft_temperature: Temperatures = None
    draw_kind: DrawKind = "deterministic"
    estimates = True
    branches = False
    widest = 1
    deepest = None

    def __post_init__(self) -> None:
        check_positive("width", self.width)

    @property
    def name(self) -> str:
        return f"opt-chain({self.width}{',head' if self.judge else ''})"

    def plant(self, sampling: Sampling, randomness: Randomness, ends: Collection[int]) -> Growth:
        return ChainGrowth(self.width, sampling, ends, self.judge, self.draft_temperature)


class ScoredGrowth(ABC):
    """A tree under way whose nodes are scored by the log-probabilities of their paths.

    most: how many children of all nodes of a level can be of use.
    """

    def __init__(
        self,
        most: int,
        sampling: Sampling,
        ends: Collection[int],
        judge: Judge | None,
        temperatures: Temperatures,
    ) -> None:
        self.most, self.ends, self.judge = most, ends, judge
        if temperatures is None:
            temperatures = (GREEDY_SCORES if sampling.greedy else sampling.temperature,)
        self.sampling = Sampling(temperatures[0]) if sampling.greedy else sampling
        self.temperatures = temperatures
        self.tree, self.expected = Tree(), []
        self._level = 0
        self._fed = [ROOT]
        self._above = np.zeros(1)
        """Scores of the nodes that were fed."""
        whole = judge is not None or sampling.top_k != 0 or sampling.top_p != 1.0
        self.likeliest = None if whole else (most, temperatures)

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        return self._add_level(*self._candidates(logits, hidden))

    def choose(self, tokens: Array, log_probs: Array) -> list[int]:
        return self._add_level(*self._best_children(*self._likely_children(log_probs, tokens)))

    def _add_level(self, rows: Array, tokens: Array, scores: Array) -> list[int]:
        """Let children into the tree, best first; those of them that are to be fed."""
        first, tree, fed = len(self.tree), self.tree, self._fed
        tree.add_level(tokens.tolist(), [fed[row] for row in rows.tolist()])
        self._level += 1
        nodes, scores = self._add(first, rows, scores)
        alive = zip(nodes.tolist(), scores.tolist(), strict=True)
        growing = [(node, score) for node, score in alive if tree.tokens[node] not in self.ends]
        self._fed = [node for node, _ in growing]
        self._above = np.array([score for _, score in growing])
        return self._fed

    @abstractmethod
    def _add(self, first: int, rows: Array, scores: Array) -> tuple[Array, Array]:
        """Which of a level's nodes, counted from `first`, may be fed, and their scores.

        Shapes: rows [N] of the nodes that were fed last, scores [N].
        """

    @abstractmethod
    def _least(self) -> float:
        """What a child must score more than, to enter the tree."""

    def _candidates(self, logits: Tensor, hidden: Tensor) -> list[Array]:
        """Rows, tokens and scores of the children that enter the tree, best first: at most n."""
        rows, tokens, scores = self._likely_children(*self._log_probs(logits))
        if self.judge is not None:
            if len(scores) > CANDIDATES * self.most:
                likely = np.argsort(-scores, kind="stable")[: CANDIDATES * self.most]
                rows, tokens, scores = rows[likely], tokens[likely], scores[likely]
            on_device = (torch.from_numpy(part).to(logits.device) for part in (rows, tokens))
            accepted = self.judge(hidden, logits, *on_device)
            scores = scores + np.log(accepted.double().cpu().numpy())
        return self._best_children(rows, tokens, scores)

    def _likely_children(
        self, log_probs: Array, columns: Array | None
    ) -> tuple[Array, Array, Array]:
        """Rows, tokens and scores of the children that score enough to enter the tree."""
        bounds = (self._least() - self._above).astype(log_probs.dtype)  # compares in its own type
        places = np.flatnonzero(log_probs > bounds[:, None])
        rows, tokens = np.divmod(places, log_probs.shape[1])
        scores = log_probs.ravel()[places] + self._above[rows]
        return rows, tokens if columns is None else columns[rows, tokens], scores

    def _best_children(self, rows: Array, tokens: Array, scores: Array) -> list[Array]:
        """At most n of them, best first."""
        order = np.argsort(-scores, kind="stable")[: self.most]
        return [rows[order], tokens[order], scores[order]]

    def _log_probs(self, logits: Tensor) -> tuple[Array, Array | None]:
        """Log-probabilities as NumPy has them, [F, C], and their tokens where C is less than V.

        From another device only the n most likely of each row are copied.
        """
        temperature = of_level(self.temperatures, self._level)
        if self.sampling.top_k == 0 and self.sampling.top_p == 1.0:
            log_probs = (exact_enough(logits) / temperature).log_softmax(dim=-1)
        else:
            log_probs = warp(logits, replace(self.sampling, temperature=temperature)).log()
        few = CANDIDATES * self.most
        if log_probs.shape[-1] > few and (log_probs.device.type != "cpu" or self._level == 0):
            best = log_probs.topk(few, dim=-1)
            return best.values.cpu().numpy(), best.indices.cpu().numpy()
        return log_probs.numpy(), None

    @abstractmethod
    def proposal(self, passes: int) -> Proposal:
        """The tree as grown so far, by so many drafter calls."""


class OptimalGrowth(ScoredGrowth):
    """Levels of the best children; a node is fed only while it is among the n best of all.

    No child scores more than its parent, so nothing below the others could enter the tree: it is
    the same as if all were fed (the paper's), for fewer drafter rows.
    """

    def __init__(
        self,
        nodes: int,
        sampling: Sampling,
        ends: Collection[int],
        judge: Judge | None,
        temperatures: Temperatures = None,
    ) -> None:
        super().__init__(nodes, sampling, ends, judge, temperatures)
        self._best = np.empty(0, dtype=np.int64)
        """At most n nodes, by falling score; a child that ties its parent comes after it."""
        self._scores = np.empty(0)
        """Theirs."""

    def _add(self, first: int, rows: Array, scores: Array) -> tuple[Array, Array]:
        nodes = np.concatenate([self._best, np.arange(first, len(self.tree))])
        scores = np.concatenate([self._scores, scores])
        order = np.argsort(-scores, kind="stable")[: self.most]
        self._best, self._scores = nodes[order], scores[order]
        self.expected.append(float(np.exp(self._scores).sum()))
        fresh = (self._best >= first) & (self._scores > self._least())  # a child scores no more
        return self._best[fresh], self._scores[fresh]

    def _least(self) -> float:
        return self._scores[-1] if len(self._best) == self.most else -np.inf

    def proposal(self, passes: int) -> Proposal:
        return self.tree.chosen(np.sort(self._best).tolist(), passes, self.expected[-1])


class ChainGrowth(ScoredGrowth):
    """A beam of paths, each with what it expects to have accepted."""

    def __init__(
        self,
        width: int,
        sampling: Sampling,
        ends: Collection[int],
        judge: Judge | None,
        temperatures: Temperatures = None,
    ) -> None:
        super().__init__(width, sampling, ends, judge, temperatures)
        self._values = np.empty(0)
        """Of every node: what the chain down to it expects to have accepted."""

    def _add(self, first: int, rows: Array, scores: Array) -> tuple[Array, Array]:
        above = np.append(self._values, 0.0)  # the last is the root's
        values = above[[self._fed[row] for row in rows]] + np.exp(scores)
        self._values = np.append(self._values, values)
        self.expected.append(float(self._values.max()))
        return np.arange(first, len(self.tree)), scores

    def _likely_children(
        self, log_probs: Array, columns: Array | None
    ) -> tuple[Array, Array, Array]:
        """As many of each node's children as the level keeps, the likeliest."""
        choices = log_probs.shape[1]
        if choices > self.most:
            best = np.argpartition(log_probs, choices - self.most, axis=1)[:, -self.most :]
            log_probs = np.take_along_axis(log_probs, best, axis=1)
            columns = best if columns is None else np.take_along_axis(columns, best, axis=1)
        return super()._likely_children(log_probs, columns)

    def _least(self) -> float:
        return -np.inf

    def proposal(self, passes: int) -> Proposal:
        node, path = int(self._values.argmax()), []
        while node != ROOT:
            path.append(node)
            node = self.tree.parents[node]
        return self.tree.chosen(path[::-1], passes, self.expected[-1])


GREEDY_SCORES = 0.5
"""Temperature of the draft probabilities that nodes are scored by, where the target is greedy.

A greedy target is surer than its drafter: at 1 (the paper) trees stay too shallow. On held-out
prompts at 25 nodes and 10 levels, the mean acceptance length at 1, 0.7, 0.5, 0.35, 0.25 is 5.21,
5.74, 6.05, 5.89, 5.74 (GSM8K pair); over a Spec-Drafter's slots 3.68, 3.73, 3.59, 3.55, 3.46
(Multi30k).
"""
CANDIDATES = 4
"""Children for each node of the tree that are looked at, at most, where all would be too many: by a
judge, in the first row, and of a row that lies on another device."""


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
