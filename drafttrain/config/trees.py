"""The kinds of draft trees, a row each: settings, shape, draws, size and the rule that fits.

Imports nothing heavy: a row names what makes its shape by a dotted path (`module:name`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from drafttrain.config.kinds import DrawKind, Evidence

EAGLE_NODES = 25


@dataclass(frozen=True)
class TreeKind:
    """What is known about a kind of tree."""

    name: str
    """`tree.kind`."""
    rule: str
    """The verifier that `auto` is where tokens are sampled."""
    nodes: Callable[[Any, int], int]
    """Most tokens of a tree by its TreeConfig and the levels asked for."""
    settings: frozenset[str] = frozenset()
    """Fields of TreeConfig that it goes by."""
    shape: str | None = None
    """What makes its Shape; None: chains have none."""
    arguments: tuple[str, ...] = ()
    """What that is given: fields of TreeConfig, `depth` (levels) or `judge` (of nodes)."""
    draw_kind: DrawKind = "deterministic"
    """How siblings are drawn; deterministic trees are chosen."""
    provides: frozenset[Evidence] = frozenset()
    """What stop policies see of it, beside depth."""
    rule_of_several: str | None = None
    """The verifier where several drafters grow such trees side by side."""

    @property
    def drawn(self) -> bool:
        return self.draw_kind != "deterministic"


_AT = "drafttrain.decoding.trees"
_WALK, _WIDE = "target-walk", ("width",)

TREES: dict[str, TreeKind] = {
    tree.name: tree
    for tree in (
        TreeKind("none", "rejection", lambda tree, depth: depth),
        TreeKind(
            "paths",
            "k-seq",
            lambda tree, depth: tree.width * depth * (1 + len(tree.drafters)),
            frozenset({"width", "drafters", "draft_temperature"}),
            f"{_AT}.drawn:Paths",
            _WIDE,
            "iid",
            rule_of_several="multi-round",
        ),
        TreeKind(
            "rsd-c",
            "recursive",
            lambda tree, depth: sum(accumulate(tree.branching, mul)),
            frozenset({"branching", "draft_temperature"}),
            f"{_AT}.drawn:Branching",
            ("branching",),
            "without_replacement",
        ),
        TreeKind(
            "rsd-s",
            "recursive",
            lambda tree, depth: tree.width * depth,
            frozenset({"width", "draft_temperature"}),
            f"{_AT}.drawn:Beam",
            _WIDE,
            "without_replacement",
        ),
        TreeKind(
            "opt-tree",
            _WALK,
            lambda tree, depth: tree.nodes,
            frozenset({"nodes", "head", "draft_temperature"}),
            f"{_AT}.chosen:Optimal",
            ("nodes", "judge", "draft_temperature"),
            provides=frozenset({"expected"}),
        ),
        TreeKind(
            "binary",
            _WALK,
            lambda tree, depth: tree.nodes,
            frozenset({"nodes"}),
            f"{_AT}.fixed:binary_tree",
            ("nodes",),
        ),
        TreeKind("eagle", _WALK, lambda tree, depth: EAGLE_NODES, shape=f"{_AT}.fixed:eagle_tree"),
        TreeKind(
            "sequoia",
            _WALK,
            lambda tree, depth: tree.nodes,
            frozenset({"nodes", "by_rank"}),
            f"{_AT}.fixed:best_fixed_tree",
            ("by_rank", "nodes", "depth"),
        ),
    )
}
"""All kinds of trees by name; `none`: the drafts are chains."""
