"""Acceptance of the rules for siblings on Bernoulli distributions (RSD, Figure 1).

    python benchmarks/sibling_rules.py
    python benchmarks/sibling_rules.py --siblings 3 --cells 20 --figure three.png

Draft Ber(p), target Ber(q). Enumerates all draws of K siblings at one node with their probabilities
and runs the production rules (`decoding/trees/verifiers.py`) on each; also computes the optimum of
all lossless rules for independent siblings. Results are exact: no sampling, no model. The square of
p and q is divided into cells, each evaluated at its centre. Prints a table, with one pair of
distributions over three tokens, and draws heat maps. Takes a minute on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from pathlib import Path

from drafttrain.config.progress import tracking
from drafttrain.data.shards.writing import renamed_when_whole
from drafttrain.decoding.trees.verifiers import Children, Rule, k_seq, multi_round, recurse

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

Draws = Sequence[tuple[tuple[int, ...], float]]
"""(tokens of the siblings in draw order, probability of this draw)."""


@dataclass(frozen=True)
class SiblingAcceptance:
    """Probability that one of K siblings at a node is accepted, by rule."""

    single: float
    """One sibling (speculative sampling): 1 - total variation between target and draft."""
    multi_round: float
    k_seq: float
    optimum: float
    """Maximum over all lossless rules for K independent siblings: the optimal transport plan with
    membership cost (OTM; SpecTr, Sun et al. 2023, Section 4)."""
    recursive: float
    """K siblings drawn without replacement, or all possible tokens if they are fewer."""


RULES: dict[str, Callable[[SiblingAcceptance], float]] = {
    "single draft": lambda one: one.single,
    "multi-round": lambda one: one.multi_round,
    "K-SEQ": lambda one: one.k_seq,
    "OTM": lambda one: one.optimum,
    "recursive": lambda one: one.recursive,
}
DRAWN = {
    "multi-round": "Multi-round (SpecInfer)",
    "K-SEQ": "K-SEQ (SpecTr)",
    "OTM": "Optimum for i.i.d. siblings (OTM)",
    "recursive": "Recursive rejection (RSD)",
}
"""Panels in the order of the paper's figure."""
POINTS = ((0.5, 0.3), (0.5, 0.1), (0.3, 0.7), (0.1, 0.9), (0.9, 0.1), (0.99, 0.01))
THREE = (0.4, 0.2, 0.4), (0.2, 0.4, 0.4)
"""Draft and target over three tokens, where two siblings do not cover the vocabulary."""
LEVELS = {0.25: "white", 0.5: "white", 0.75: "black", 0.9: "black"}
"""Acceptance values of contour lines, and their colours."""


def main() -> None:
    arguments = parse_arguments()
    middles = (np.arange(arguments.cells) + 0.5) / arguments.cells
    points = {f"{p:g}, {q:g}": bernoulli(p, q, arguments.siblings) for p, q in POINTS}
    points[f"{THREE[0]}, {THREE[1]}"] = acceptance(*THREE, arguments.siblings)
    square = [
        [bernoulli(p, q, arguments.siblings) for p in middles]
        for q in tracking(middles, "rows of q", "row")
    ]
    maps = {
        name: np.array([[rule(cell) for cell in row] for row in square])
        for name, rule in RULES.items()
    }
    print("\n".join(table(points, maps, arguments.cells)))
    draw(maps, arguments.siblings, arguments.figure)
    print(f"Wrote {arguments.figure}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--siblings", type=int, default=2, help="K, at most 7 (default 2, as in the paper)"
    )
    parser.add_argument("--cells", type=int, default=50, help="cells per side (default 50)")
    parser.add_argument(
        "--figure", type=Path, default=Path("rsd_figure_1.png"), help="PNG to write"
    )
    arguments = parser.parse_args()
    if arguments.cells < 2:
        parser.error(f"--cells {arguments.cells}: give 2 or more")
    if not 1 <= arguments.siblings <= 7:
        parser.error(f"--siblings {arguments.siblings}: give 1 to 7")
    if not arguments.figure.parent.is_dir():
        parser.error(f"--figure {arguments.figure}: make its folder first")
    return arguments


def bernoulli(p: float, q: float, siblings: int) -> SiblingAcceptance:
    """Acceptance for draft Ber(p) and target Ber(q)."""
    return acceptance((1.0 - p, p), (1.0 - q, q), siblings)


def acceptance(draft: Sequence[float], target: Sequence[float], siblings: int) -> SiblingAcceptance:
    """Computes the acceptance of each rule for K siblings from probabilities of V tokens each."""
    draft_probs, target_probs = (torch.tensor(one, dtype=torch.float64) for one in (draft, target))
    independent = list(independent_draws(draft_probs, siblings))
    distinct = list(distinct_draws(draft_probs, siblings))
    return SiblingAcceptance(
        single=float(torch.minimum(target_probs, draft_probs).sum()),
        multi_round=rule_acceptance(multi_round, target_probs, draft_probs, independent),
        k_seq=rule_acceptance(k_seq, target_probs, draft_probs, independent),
        optimum=optimal_acceptance(target_probs, draft_probs, siblings),
        recursive=rule_acceptance(recurse, target_probs, draft_probs, distinct),
    )


def independent_draws(
    draft_probs: Tensor, siblings: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields draws of K siblings with replacement. Shapes: [V]."""
    probs = draft_probs.tolist()
    for tokens in product(_support(probs), repeat=siblings):
        yield tokens, math.prod(probs[token] for token in tokens)


def distinct_draws(draft_probs: Tensor, siblings: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields draws of K siblings without replacement, or of all possible tokens if they are fewer.
    Shapes: [V]."""
    probs = draft_probs.tolist()
    support = _support(probs)
    for tokens in permutations(support, min(siblings, len(support))):
        left, probability = dict(enumerate(probs)), 1.0
        for token in tokens:
            probability *= left[token] / math.fsum(left.values())
            del left[token]
        yield tokens, probability


def rule_acceptance(rule: Rule, target_probs: Tensor, draft_probs: Tensor, draws: Draws) -> float:
    """Probability that a rejection rule accepts one of the siblings. Shapes: [V], [V]."""
    rejected = []
    for tokens, probability in draws:
        count = len(tokens)
        rows = draft_probs.expand(count, -1)
        outcome = _AllRejected()
        rule(target_probs, Children(tokens, [1] * count, rows), outcome)
        rejected.append(probability * outcome.probability)
    return max(0.0, 1.0 - math.fsum(rejected))


def optimal_acceptance(target_probs: Tensor, draft_probs: Tensor, siblings: int) -> float:
    """Maximum acceptance of a lossless rule for K independent siblings.

    A rule moves probability from each set of siblings to its members, each of which takes at most
    its target probability. By duality of flows and cuts the most that can be moved is the minimum
    of target(A) + 1 - draft(A)^K over sets A of tokens. Shapes: [V], [V].
    """
    tokens = range(len(target_probs))
    sets = [list(one) for size in range(len(tokens) + 1) for one in combinations(tokens, size)]
    cuts = (target_probs[one].sum() + 1.0 - draft_probs[one].sum() ** siblings for one in sets)
    return float(min(cuts))


class _AllRejected:
    """`Randomness` in which a rule rejects all siblings; tracks the `probability` of that.

    Siblings come in draw order. Rules for independent siblings try copies in random order; this
    does not matter for the sum over all draws, as each order of a draw is an equally likely draw.
    """

    def __init__(self) -> None:
        self.probability = 1.0

    def categorical(self, probs: Tensor) -> Tensor:
        """Returns the first possible index, which is the next sibling in draw order."""
        return (probs > 0.0).int().argmax(dim=-1)

    def accept_run(self, probs: Tensor) -> int:
        self.probability *= 1.0 - float(probs[0])
        return 0


def _support(probs: Sequence[float]) -> list[int]:
    return [token for token, probability in enumerate(probs) if probability > 0.0]


def table(
    points: dict[str, SiblingAcceptance], maps: dict[str, np.ndarray], cells: int
) -> list[str]:
    """Makes a Markdown table of acceptance at some points and over the square."""
    lines = ["| draft p, target q | " + " | ".join(RULES) + " |"]
    lines.append("| --- |" + " ---: |" * len(RULES))
    for name, one in points.items():
        lines.append(row(name, [rule(one) for rule in RULES.values()]))
    lines.append(row(f"mean of {cells} × {cells}", [values.mean() for values in maps.values()]))
    lines.append(row(f"minimum of {cells} × {cells}", [values.min() for values in maps.values()]))
    return lines


def row(name: str, values: Sequence[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.4f}" for value in values) + " |"


def draw(maps: dict[str, np.ndarray], siblings: int, path: Path) -> None:
    """Draws one heat map per rule, on one colour-blind safe scale."""
    figure = Figure(figsize=(3.3 * len(DRAWN), 3.7), dpi=150, layout="constrained")
    axes = list(figure.subplots(1, len(DRAWN), sharey=True))
    for axis, (name, title) in zip(axes, DRAWN.items(), strict=True):
        image = heat_map(axis, maps[name], title)
    axes[0].set_ylabel("q, target Ber(q)")
    figure.colorbar(image, ax=axes, label="probability that a sibling is accepted", shrink=0.86)
    figure.suptitle(
        f"Acceptance of {siblings} siblings, draft Ber(p), target Ber(q)",
        fontsize=11, x=0.01, ha="left",
    )  # fmt: skip
    with renamed_when_whole(path) as temporary:
        figure.savefig(temporary, format="png")


def heat_map(axis: Axes, values: np.ndarray, title: str):
    """Draws one panel, p to the right and q upwards; returns the image, for the colour scale."""
    image = axis.imshow(
        values, origin="lower", extent=(0, 1, 0, 1), vmin=0.0, vmax=1.0, cmap="cividis"
    )
    if values.min() < max(LEVELS):
        middles = (np.arange(len(values)) + 0.5) / len(values)
        lines = axis.contour(
            middles, middles, values, list(LEVELS), colors=list(LEVELS.values()), linewidths=0.8
        )
        axis.clabel(lines, fmt="%g", fontsize=7.5)
    axis.set(xlabel="p, draft Ber(p)")
    axis.set_title(f"{title}\nmean {values.mean():.3f}", fontsize=10, fontweight="bold")
    axis.set(xticks=(0, 0.25, 0.5, 0.75, 1), yticks=(0, 0.25, 0.5, 0.75, 1))
    return image


if __name__ == "__main__":
    main()
