"""Tree shapes with random nodes: paths, branching (RSD-C), stochastic beam search (RSD-S)."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.trees.shapes import Shape, Tree


@dataclass(frozen=True)
class Paths(Shape):
    """K independent paths; equal prefixes are one node with a count (SpecTr, SpecInfer)."""

    count: int
    draw_kind = "iid"

    @property
    def name(self) -> str:
        return f"paths({self.count})"

    @property
    def drafts_trees(self) -> bool:
        return self.count > 1

    def grow(self, tree: Tree, logits: Tensor) -> range:
        probs = tree.keep_probs(logits)
        owners = [
            row for row, copies in enumerate(tree.frontier_notes(self.count)) for _ in range(copies)
        ]
        drawn = tree.randomness.categorical(probs[owners]).tolist()
        copies = Counter(zip(owners, drawn, strict=True))  # equal children become one node
        rows, tokens = zip(*copies, strict=True)
        return tree.add(tokens, rows, copies.values())


@dataclass(frozen=True)
class Branching(Shape):
    """widths[l] siblings per parent at level l, drawn without replacement (RSD-C).

    RSD (Jeon et al. 2024), Algorithm 3: Gumbel-top-k of each row, siblings in the order drawn;
    fewer if a row has fewer tokens of positive probability.
    """

    widths: tuple[int, ...]
    draw_kind = "without_replacement"

    @property
    def widest(self) -> int:
        return max(self.widths)

    @property
    def deepest(self) -> int:
        return len(self.widths)

    @property
    def name(self) -> str:
        return f"rsd-c({','.join(map(str, self.widths))})"

    def grow(self, tree: Tree, logits: Tensor) -> range:
        probs = tree.keep_probs(logits)
        width = min(self.widths[tree.level], probs.shape[-1])
        drawn = tree.randomness.without_replacement(probs, width).tolist()
        rows = [row for row, siblings in enumerate(drawn) for token in siblings if token >= 0]
        tokens = [token for siblings in drawn for token in siblings if token >= 0]
        added = tree.add(tokens, rows, [None] * len(rows))
        return added if tree.level + 1 < len(self.widths) else range(0)


@dataclass(frozen=True)
class Beam(Shape):
    """Stochastic beam search: `width` sequences per level, without replacement (RSD-S).

    RSD (Jeon et al. 2024), Algorithm 8 and Equation 11; Kool et al. 2019. Each level keeps the
    sequences with the largest perturbed log-probabilities, each truncated to its parent's; siblings
    are in falling order of it. Notes are (log-probability, perturbed log-probability) of a path.
    """

    width: int
    draw_kind = "without_replacement"

    @property
    def widest(self) -> int:
        return self.width

    @property
    def name(self) -> str:
        return f"rsd-s({self.width})"

    def grow(self, tree: Tree, logits: Tensor) -> range:
        probs = tree.keep_probs(logits)
        noted = tree.frontier_notes((0.0, 0.0))
        above, bounds = torch.tensor(noted, dtype=probs.dtype, device=probs.device).T
        log_probs = probs.log() + above[:, None]
        # truncation keeps the order within a row: only its `width` largest can be among the best
        width = min(self.width, probs.shape[-1])
        largest = (log_probs + tree.randomness.gumbel(log_probs)).topk(width, dim=-1)
        keys = perturb(largest.values, bounds)
        best = keys.flatten().topk(min(self.width, keys.numel()))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        indices = [index for index, key in pairs if key > -torch.inf]
        rows, ranks = [index // width for index in indices], [index % width for index in indices]
        tokens = largest.indices[rows, ranks]
        notes = torch.stack((log_probs[rows, tokens], keys[rows, ranks]), 1).tolist()
        return tree.add(tokens.tolist(), rows, notes)


def perturb(keys: Tensor, bounds: Tensor) -> Tensor:
    """Truncates perturbed log-probabilities so that the largest of each row equals its bound.

    Kool et al. 2019, Appendix B.3, in the numerically stable form: with keys G = log-probability +
    Gumbel, Z the largest of the row and u = T - G + log(1 - exp(G - Z)), the result is
    T - max(0, u) - log(1 + exp(-|u|)). Shapes: keys [F, N], bounds T [F] -> [F, N].
    """
    bound = bounds[:, None]
    largest = keys.max(dim=-1, keepdim=True).values
    u = bound - keys + torch.log1p(-torch.exp(keys - largest))
    return bound - u.clamp_min(0.0) - torch.log1p(torch.exp(-u.abs()))
