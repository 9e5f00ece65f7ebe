"""How draft trees grow: which children the nodes of a level get.

A shape plants a `Growth` for each round. The growth is handed the drafter's rows below the nodes
that were fed last, adds their children, and says which of these are to be fed next: those whose
children may still enter the tree. Every random choice goes through `Chance`; shapes that draw
(`Paths`, `Branching`, `Beam`) keep the rows they drew from, for rejection. Shapes that choose
(`Optimal`, `Fixed`) make point masses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Chance, Draw, Proposal, Sampling

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

    def drawn(self, draw: Draw, passes: int, counts: list[int] | None = None) -> Proposal:
        """The tree with the rows it was drawn from."""
        return Proposal(
            tokens=torch.tensor(self.tokens, dtype=torch.long),
            parents=torch.tensor(self.parents, dtype=torch.long),
            draw=draw,
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
    draw: Draw
    branches: bool
    estimates: bool
    """Whether `Growth.expected` is worked out, for stop policies that go by it."""
    widest: int
    """Most siblings that it is bound to ask for."""

    def plant(self, sampling: Sampling, chance: Chance, ends: Collection[int]) -> Growth:
        """A tree for one round; tokens in `ends` get no children."""
        ...


@dataclass(frozen=True)
class Paths:
    """K independent paths; equal beginnings are one node with a count (SpecTr, SpecInfer)."""

    count: int
    draw: Draw = "iid"
    estimates = False
    widest = 1

    def __post_init__(self) -> None:
        _check_positive("paths", self.count)

    @property
    def name(self) -> str:
        return f"paths({self.count})"

    @property
    def branches(self) -> bool:
        return self.count > 1

    def plant(self, sampling: Sampling, chance: Chance, ends: Collection[int]) -> Growth:
        return PathsGrowth(self.count, sampling, chance, ends)


class PathsGrowth:
    """Each node draws as many children as paths go through it."""

    def __init__(
        self, count: int, sampling: Sampling, chance: Chance, ends: Collection[int]
    ) -> None:
        self.sampling, self.chance, self.ends = sampling, chance, ends
        self.tree, self.expected = Tree(), []
        self.counts: list[int] = []
        self._fed, self._through = [ROOT], [count]

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        probs = warp(logits, self.sampling)
        first = self.tree.add_rows(probs)
        owners = [row for row, through in enumerate(self._through) for _ in range(through)]
        drawn = self.chance.categorical(probs[owners]).tolist()
        added = []
        for (row, token), copies in Counter(zip(owners, drawn, strict=True)).items():
            added.append(self.tree.add(token, self._fed[row], first + row))
            self.counts.append(copies)
        self._fed = [node for node in added if self.tree.tokens[node] not in self.ends]
        self._through = [self.counts[node] for node in self._fed]
        return self._fed

    def proposal(self, passes: int) -> Proposal:
        return self.tree.drawn("iid", passes, self.counts)


@dataclass(frozen=True)
class Branching:
    """widths[l] siblings below every node of level l, without replacement (RSD-C).

    RSD (Jeon et al. 2024), Algorithm 3: Gumbel-top-k of each row, siblings in the order drawn.
    Fewer where a row has fewer possible tokens.
    """

    widths: tuple[int, ...]
    draw: Draw = "without_replacement"
    branches = True
    estimates = False

    def __post_init__(self) -> None:
        for width in self.widths or (0,):
            _check_positive("branching", width)

    @property
    def widest(self) -> int:
        return max(self.widths)

    @property
    def name(self) -> str:
        return f"rsd-c({','.join(map(str, self.widths))})"

    def plant(self, sampling: Sampling, chance: Chance, ends: Collection[int]) -> Growth:
        return BranchingGrowth(self.widths, sampling, chance, ends)


class BranchingGrowth:
    """Level l draws widths[l] siblings from each row."""

    def __init__(
        self, widths: Sequence[int], sampling: Sampling, chance: Chance, ends: Collection[int]
    ) -> None:
        self.widths, self.sampling, self.chance, self.ends = widths, sampling, chance, ends
        self.tree, self.expected = Tree(), []
        self._fed, self._level = [ROOT], 0

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        probs = warp(logits, self.sampling)
        first = self.tree.add_rows(probs)
        width = min(self.widths[self._level], probs.shape[-1])
        drawn = self.chance.without_replacement(probs, width).tolist()
        self._level += 1
        added = [
            self.tree.add(token, self._fed[row], first + row)
            for row, siblings in enumerate(drawn)
            for token in siblings
            if token >= 0
        ]
        if self._level == len(self.widths):
            return []
        self._fed = [node for node in added if self.tree.tokens[node] not in self.ends]
        return self._fed

    def proposal(self, passes: int) -> Proposal:
        return self.tree.drawn("without_replacement", passes)


@dataclass(frozen=True)
class Beam:
    """Stochastic beam search: `width` sequences a level, without replacement (RSD-S).

    RSD (Jeon et al. 2024), Algorithm 8 and Equation 11; Kool et al. 2019. Levels hold the sequences
    of largest perturbed log-probability, each truncated to its parent's; siblings stand in falling
    order of it.
    """

    width: int
    draw: Draw = "without_replacement"
    branches = True
    estimates = False

    def __post_init__(self) -> None:
        _check_positive("width", self.width)

    @property
    def widest(self) -> int:
        return self.width

    @property
    def name(self) -> str:
        return f"rsd-s({self.width})"

    def plant(self, sampling: Sampling, chance: Chance, ends: Collection[int]) -> Growth:
        return BeamGrowth(self.width, sampling, chance, ends)


class BeamGrowth:
    """Each level keeps the `width` best perturbed sequences of all children."""

    def __init__(
        self, width: int, sampling: Sampling, chance: Chance, ends: Collection[int]
    ) -> None:
        self.width, self.sampling, self.chance, self.ends = width, sampling, chance, ends
        self.tree, self.expected = Tree(), []
        self._fed = [ROOT]
        self._log_probs: Tensor | None = None
        self._perturbed: Tensor | None = None

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        probs = warp(logits, self.sampling)
        first = self.tree.add_rows(probs)
        log_probs = probs.log()
        bound = probs.new_zeros(len(probs))
        if self._log_probs is not None and self._perturbed is not None:
            log_probs = log_probs + self._log_probs[:, None]
            bound = self._perturbed
        # truncation keeps the order within a row, so that no more than these can be among the best
        width = min(self.width, probs.shape[-1])
        largest = (log_probs + self.chance.gumbel(log_probs)).topk(width, dim=-1)
        keys = perturb(largest.values, bound)
        best = keys.flatten().topk(min(self.width, keys.numel()))
        fed, kept = [], []
        for place, key in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            if key == -torch.inf:
                break
            row, rank = divmod(place, width)
            token = int(largest.indices[row, rank])
            node = self.tree.add(token, self._fed[row], first + row)
            if token not in self.ends:
                fed.append(node)
                kept.append((row, rank, token))
        self._fed = fed
        rows, ranks, tokens = zip(*kept, strict=True) if kept else ((), (), ())
        self._log_probs = log_probs[list(rows), list(tokens)]
        self._perturbed = keys[list(rows), list(ranks)]
        return fed

    def proposal(self, passes: int) -> Proposal:
        return self.tree.drawn("without_replacement", passes)


def perturb(keys: Tensor, bounds: Tensor) -> Tensor:
    """Perturbed log-probabilities of children, the largest of each row equal to the row's bound.

    Kool et al. 2019, Appendix B.3, in the form that stays finite: with keys G = log-probability +
    Gumbel and Z the largest of the row, u = T - G + log(1 - exp(G - Z)) and the result is
    T - max(0, u) - log(1 + exp(-|u|)). Shapes: keys [F, N], bounds T [F] -> [F, N].
    """
    bound = bounds[:, None]
    largest = keys.max(dim=-1, keepdim=True).values
    u = bound - keys + torch.log1p(-torch.exp(keys - largest))
    return bound - u.clamp_min(0.0) - torch.log1p(torch.exp(-u.abs()))


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
    draw: Draw = "deterministic"
    estimates = True
    widest = 1

    def __post_init__(self) -> None:
        _check_positive("nodes", self.nodes)

    @property
    def name(self) -> str:
        return f"opt-tree({self.nodes}{',head' if self.judge else ''})"

    @property
    def branches(self) -> bool:
        return self.nodes > 1

    def plant(self, sampling: Sampling, chance: Chance, ends: Collection[int]) -> Growth:
        return OptimalGrowth(self.nodes, sampling, ends, self.judge)


class OptimalGrowth:
    """Levels of the best children; a node is fed only while it is among the n best of all.

    No child scores more than its parent, so nothing below the others could enter the tree: it is
    the same as if all were fed (the paper's), for fewer drafter rows.
    """

    def __init__(
        self, nodes: int, sampling: Sampling, ends: Collection[int], judge: Judge | None
    ) -> None:
        self.nodes, self.ends, self.judge = nodes, ends, judge
        self.sampling = Sampling(GREEDY_SCORES) if sampling.greedy else sampling
        self.tree, self.expected = Tree(), []
        self._fed = [ROOT]
        self._above = np.zeros(1)
        """Scores (log-probabilities of paths) of the nodes that were fed."""
        self._best = np.empty(0, dtype=np.int64)
        """At most n nodes, by falling score; a child that ties its parent comes after it."""
        self._scores = np.empty(0)
        """Theirs."""

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        rows, tokens, scores = self._candidates(logits, hidden)
        first, tree, fed = len(self.tree), self.tree, self._fed
        tree.add_level(tokens.tolist(), [fed[row] for row in rows.tolist()])
        nodes = np.concatenate([self._best, np.arange(first, len(tree))])
        scores = np.concatenate([self._scores, scores])
        order = np.argsort(-scores, kind="stable")[: self.nodes]
        self._best, self._scores = nodes[order], scores[order]
        self.expected.append(float(np.exp(self._scores).sum()))
        fresh = (self._best >= first) & (self._scores > self._least())  # a child scores no more
        alive = zip(self._best[fresh].tolist(), self._scores[fresh].tolist(), strict=True)
        growing = [(node, score) for node, score in alive if tree.tokens[node] not in self.ends]
        self._fed = [node for node, _ in growing]
        self._above = np.array([score for _, score in growing])
        return self._fed

    def _candidates(self, logits: Tensor, hidden: Tensor) -> tuple[Array, Array, Array]:
        """Rows, tokens and scores of the children that enter the tree, best first: at most n."""
        log_probs, columns = self._log_probs(logits)
        bounds = (self._least() - self._above).astype(log_probs.dtype)  # compares in its own type
        places = np.flatnonzero(log_probs > bounds[:, None])
        rows, tokens = np.divmod(places, log_probs.shape[1])
        scores = log_probs.ravel()[places] + self._above[rows]
        if columns is not None:
            tokens = columns[rows, tokens]
        if self.judge is not None:
            if len(scores) > CANDIDATES * self.nodes:
                likely = np.argsort(-scores, kind="stable")[: CANDIDATES * self.nodes]
                rows, tokens, scores = rows[likely], tokens[likely], scores[likely]
            on_device = (torch.from_numpy(part).to(logits.device) for part in (rows, tokens))
            accepted = self.judge(hidden, logits, *on_device)
            scores = scores + np.log(accepted.double().cpu().numpy())
        order = np.argsort(-scores, kind="stable")[: self.nodes]
        return rows[order], tokens[order], scores[order]

    def _least(self) -> float:
        """What a child must score more than, to enter the tree."""
        return self._scores[-1] if len(self._best) == self.nodes else -np.inf

    def _log_probs(self, logits: Tensor) -> tuple[Array, Array | None]:
        """Log-probabilities as NumPy has them, [F, C], and their tokens where C is less than V.

        From another device only the n most likely of each row are copied.
        """
        if self.sampling.top_k == 0 and self.sampling.top_p == 1.0:
            logits = logits if logits.dtype == torch.float64 else logits.float()
            log_probs = (logits / self.sampling.temperature).log_softmax(dim=-1)
        else:
            log_probs = warp(logits, self.sampling).log()
        few = CANDIDATES * self.nodes
        if log_probs.shape[-1] > few and (log_probs.device.type != "cpu" or len(self._best) == 0):
            best = log_probs.topk(few, dim=-1)
            return best.values.cpu().numpy(), best.indices.cpu().numpy()
        return log_probs.numpy(), None

    def proposal(self, passes: int) -> Proposal:
        return self.tree.chosen(np.sort(self._best).tolist(), passes, self.expected[-1])


GREEDY_SCORES = 0.5
"""Temperature of the draft probabilities that nodes are scored by, where the target is greedy.

A greedy target is surer than its drafter: at 1 (the paper) trees stay too shallow. On held-out
prompts at 25 nodes and 10 levels, tokens a round at 1, 0.7, 0.5, 0.35, 0.25: 5.21, 5.74, 6.05,
5.89, 5.74 (GSM8K pair); over a Spec-Drafter's slots 3.68, 3.73, 3.59, 3.55, 3.46 (Multi30k).
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
    draw: Draw = "deterministic"
    estimates = False

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in self.paths):
                raise ValueError(
                    f"path {path} of a fixed tree needs ranks of 0 or more and its beginning "
                    f"{path[:-1]} in the tree; add it"
                )
        _check_positive("nodes", len(self.paths))

    @property
    def widest(self) -> int:
        return 1 + max(rank for path in self.paths for rank in path)

    @property
    def name(self) -> str:
        return f"{self.kind}({len(self.paths)})"

    @property
    def branches(self) -> bool:
        return len(self.paths) > max(map(len, self.paths))

    def plant(self, sampling: Sampling, chance: Chance, ends: Collection[int]) -> Growth:
        return FixedGrowth(self.paths, ends)


class FixedGrowth:
    """Ranks to tokens, level by level."""

    def __init__(self, paths: frozenset[tuple[int, ...]], ends: Collection[int]) -> None:
        self.tree, self.expected, self.ends = Tree(), [], ends
        self._below: dict[tuple[int, ...], list[int]] = {}
        for path in sorted(paths):
            self._below.setdefault(path[:-1], []).append(path[-1])
        self._fed: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        vocabulary = logits.shape[-1]
        widest = 1 + max(self._below[path][-1] for _, path in self._fed)
        likeliest = logits.topk(min(widest, vocabulary), dim=-1).indices.tolist()
        fed = []
        for (parent, path), tokens in zip(self._fed, likeliest, strict=True):
            for rank in self._below[path]:
                if rank >= vocabulary:
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
    _check_positive("nodes", nodes)
    _check_positive("depth", depth)
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


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value} of a draft tree must be at least 1")
