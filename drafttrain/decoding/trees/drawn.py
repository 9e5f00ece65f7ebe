"""Tree shapes whose nodes are drawn: paths, branching (RSD-C), stochastic beams (RSD-S)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.trees.shapes import ROOT, Growth, Tree, check_positive
from drafttrain.decoding.types import Proposal, Sampling


@dataclass(frozen=True)
class Paths:
    """K independent paths; equal beginnings are one node with a count (SpecTr, SpecInfer)."""

    count: int
    draw_kind: DrawKind = "iid"
    estimates = False
    widest = 1
    deepest = None

    def __post_init__(self) -> None:
        check_positive("paths", self.count)

    @property
    def name(self) -> str:
        return f"paths({self.count})"

    @property
    def branches(self) -> bool:
        return self.count > 1

    def plant(self, sampling: Sampling, randomness: Randomness, ends: Collection[int]) -> Growth:
        return PathsGrowth(self.count, sampling, randomness, ends)


class PathsGrowth:
    """Each node draws as many children as paths go through it."""

    def __init__(
        self, count: int, sampling: Sampling, randomness: Randomness, ends: Collection[int]
    ) -> None:
        self.sampling, self.randomness, self.ends = sampling, randomness, ends
        self.tree, self.expected = Tree(), []
        self.counts: list[int] = []
        self._fed, self._through = [ROOT], [count]

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        probs = warp(logits, self.sampling)
        first = self.tree.add_rows(probs)
        owners = [row for row, through in enumerate(self._through) for _ in range(through)]
        drawn = self.randomness.categorical(probs[owners]).tolist()
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
    draw_kind: DrawKind = "without_replacement"
    branches = True
    estimates = False

    def __post_init__(self) -> None:
        for width in self.widths or (0,):
            check_positive("branching", width)

    @property
    def widest(self) -> int:
        return max(self.widths)

    @property
    def deepest(self) -> int:
        return len(self.widths)

    @property
    def name(self) -> str:
        return f"rsd-c({','.join(map(str, self.widths))})"

    def plant(self, sampling: Sampling, randomness: Randomness, ends: Collection[int]) -> Growth:
        return BranchingGrowth(self.widths, sampling, randomness, ends)


class BranchingGrowth:
    """Level l draws widths[l] siblings from each row."""

    def __init__(
        self,
        widths: Sequence[int],
        sampling: Sampling,
        randomness: Randomness,
        ends: Collection[int],
    ) -> None:
        self.widths, self.sampling, self.randomness, self.ends = widths, sampling, randomness, ends
        self.tree, self.expected = Tree(), []
        self._fed, self._level = [ROOT], 0

    def grow(self, logits: Tensor, hidden: Tensor) -> list[int]:
        probs = warp(logits, self.sampling)
        first = self.tree.add_rows(probs)
        width = min(self.widths[self._level], probs.shape[-1])
        drawn = self.randomness.without_replacement(probs, width).tolist()
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
    draw_kind: DrawKind = "without_replacement"
    branches = True
    estimates = False
    deepest = None

    def __post_init__(self) -> None:
        check_positive("width", self.width)

    @property
    def widest(self) -> int:
        return self.width

    @property
    def name(self) -> str:
        return f"rsd-s({self.width})"

    def plant(self, sampling: Sampling, randomness: Randomness, ends: Collection[int]) -> Growth:
        return BeamGrowth(self.width, sampling, randomness, ends)


class BeamGrowth:
    """Each level keeps the `width` best perturbed sequences of all children."""

    def __init__(
        self, width: int, sampling: Sampling, randomness: Randomness, ends: Collection[int]
    ) -> None:
        self.width, self.sampling, self.randomness, self.ends = width, sampling, randomness, ends
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
        largest = (log_probs + self.randomness.gumbel(log_probs)).topk(width, dim=-1)
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
