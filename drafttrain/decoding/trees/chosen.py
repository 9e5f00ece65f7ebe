"""Tree shapes chosen anew each round by the drafter's probabilities: OPT-Trees."""

from __future__ import annotations

from collections.abc import Collection
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


class OptimalGrowth:
    """Levels of the best children; a node is fed only while it is among the n best of all.

    Nodes are scored by the log-probabilities of their paths. No child scores more than its parent,
    so nothing below the others could enter the tree: it is the same as if all were fed (the
    paper's), for fewer drafter rows.
    """

    def __init__(
        self,
        most: int,
        sampling: Sampling,
        ends: Collection[int],
        judge: Judge | None,
        temperatures: Temperatures = None,
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
        self._best = np.empty(0, dtype=np.int64)
        """At most n nodes, by falling score; a child that ties its parent comes after it."""
        self._scores = np.empty(0)
        """Theirs."""
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
        nodes, scores = self._add(first, scores)
        alive = zip(nodes.tolist(), scores.tolist(), strict=True)
        growing = [(node, score) for node, score in alive if tree.tokens[node] not in self.ends]
        self._fed = [node for node, _ in growing]
        self._above = np.array([score for _, score in growing])
        return self._fed

    def _add(self, first: int, scores: Array) -> tuple[Array, Array]:
        """Which of a level's nodes, counted from `first`, may be fed, and their scores."""
        nodes = np.concatenate([self._best, np.arange(first, len(self.tree))])
        scores = np.concatenate([self._scores, scores])
        order = np.argsort(-scores, kind="stable")[: self.most]
        self._best, self._scores = nodes[order], scores[order]
        self.expected.append(float(np.exp(self._scores).sum()))
        fresh = (self._best >= first) & (self._scores > self._least())  # a child scores no more
        return self._best[fresh], self._scores[fresh]

    def _least(self) -> float:
        """What a child must score more than, to enter the tree."""
        return self._scores[-1] if len(self._best) == self.most else -np.inf

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

    def proposal(self, passes: int) -> Proposal:
        """The tree as grown so far, by so many drafter calls."""
        return self.tree.chosen(np.sort(self._best).tolist(), passes, self.expected[-1])


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
