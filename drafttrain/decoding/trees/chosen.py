"""Tree shapes that adapt to the drafter's probabilities in each round: OPT-Trees."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from drafttrain.decoding.sampling import at_least_float32, warp
from drafttrain.decoding.trees.shapes import Array, Likeliest, Shape, Tree, check_not_nan
from drafttrain.decoding.types import Sampling


@dataclass(frozen=True)
class Optimal(Shape):
    """The tree of n nodes with the most expected accepted tokens (OPT-Tree, Wang et al. 2025).

    A node's score is the product of the draft probabilities on its path, an estimate of the
    probability that it is accepted. The n nodes with the largest scores form a tree, and the sum
    E(A) of their scores is the expected number of accepted tokens. A node is expanded only if it is
    among the n best so far: no child scores more than its parent, so no descendant of another node
    could enter the tree. The result equals the paper's, which expands all nodes, with fewer drafter
    rows. Notes are the log-probabilities of paths.
    """

    nodes: int
    draft_temperature: float | None = None
    """Temperature of the rows that score nodes. None: the target's temperature, or `GREEDY_SCORES`
    in greedy decoding."""
    estimates = True

    @property
    def name(self) -> str:
        return f"opt-tree({self.nodes})"

    @property
    def drafts_trees(self) -> bool:
        return self.nodes > 1

    def likeliest(self, sampling: Sampling) -> Likeliest | None:
        return (self.nodes, self._temperature(sampling)) if sampling.keeps_all else None

    def grow(self, tree: Tree, logits: Tensor) -> list[int]:
        return self.choose(tree, *self._candidates(tree, logits))

    def choose(self, tree: Tree, tokens: Array, log_probs: Array) -> list[int]:
        parent_scores = np.array(tree.frontier_notes(0.0))
        # cast, so that the comparison does not promote all of log_probs to float64
        bounds = (self._least(tree) - parent_scores).astype(log_probs.dtype)
        indices = np.flatnonzero(log_probs > bounds[:, None])
        rows, columns = np.divmod(indices, log_probs.shape[1])
        scores = log_probs[rows, columns] + parent_scores[rows]
        order = np.argsort(-scores, kind="stable")[: self.nodes]
        rows, columns = rows[order], columns[order]
        added = tree.add(tokens[rows, columns].tolist(), rows.tolist(), scores[order].tolist())
        best, least = self._best(tree), self._least(tree)
        tree.expected.append(float(np.exp([tree.notes[node] for node in best]).sum()))
        # a child scores no more than its parent
        return [node for node in best if node >= added.start and tree.notes[node] > least]

    def kept(self, tree: Tree) -> list[int]:
        return sorted(self._best(tree))

    def _best(self, tree: Tree) -> list[int]:
        """Returns the n best nodes, best first; a child with its parent's score comes after it."""
        return np.argsort(-np.array(tree.notes), kind="stable")[: self.nodes].tolist()

    def _least(self, tree: Tree) -> float:
        """Returns the score that a child must exceed to enter the tree."""
        best = self._best(tree)
        return tree.notes[best[-1]] if len(best) == self.nodes else -np.inf

    def _candidates(self, tree: Tree, logits: Tensor) -> tuple[Array, Array]:
        """Returns tokens [F, C] and their log-probabilities [F, C] in NumPy.

        C is V; from a device only the `CANDIDATES` * n most likely tokens of each row are copied.
        """
        sampling = Sampling() if tree.sampling.greedy else tree.sampling
        temperature = self._temperature(sampling)
        if sampling.keeps_all:
            log_probs = (at_least_float32(logits) / temperature).log_softmax(dim=-1)
        else:
            log_probs = warp(logits, replace(sampling, temperature=temperature)).log()
        few = CANDIDATES * self.nodes
        if log_probs.shape[-1] > few and (log_probs.device.type != "cpu" or tree.level == 0):
            best = log_probs.topk(few, dim=-1)
            log_probs, tokens = best.values.cpu(), best.indices.cpu().numpy()
        else:
            log_probs = log_probs.cpu()
            tokens = np.broadcast_to(np.arange(log_probs.shape[-1]), log_probs.shape)
        check_not_nan(log_probs)
        return tokens, log_probs.numpy()

    def _temperature(self, sampling: Sampling) -> float:
        default = GREEDY_SCORES if sampling.greedy else sampling.temperature
        return self.draft_temperature or default


GREEDY_SCORES = 0.5
"""Temperature of the draft probabilities that score nodes in greedy decoding.

A greedy target's choice is more certain than the drafter's distribution: at temperature 1 (the
paper) trees stay too shallow. On held-out prompts with 25 nodes and 10 levels, the mean acceptance
length at 1, 0.7, 0.5, 0.35, 0.25 is 5.21, 5.74, 6.05, 5.89, 5.74 (GSM8K pair); over the slots of a
Spec-Drafter 3.68, 3.73, 3.59, 3.55, 3.46 (Multi30k).
"""
CANDIDATES = 4
"""Tokens considered per row, as a multiple of the tree's nodes: in the first row, and in all rows
that are on a device."""
