"""Stop policies, kinds of draft trees and rules of verification: a table each, a row a kind.

What settings, sweeps, policy.json and checks ask about a kind stands in its row. Policies and rules
are functions: a policy `(state, value) -> bool`, whether to draft one more token; a rule
`(proposal, target_logits, sampling, randomness, **settings) -> Verdict`. Rows name them, and what
makes the shape of a tree, by dotted paths (`module:name`): the tables import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from drafttrain.config.kinds import DrawKind, Evidence

EAGLE_NODES = 25
ANY_DRAW: frozenset[DrawKind] = frozenset(
    {"deterministic", "iid", "independent", "without_replacement"}
)


@dataclass(frozen=True)
class StopKind:
    """What is known about a stop policy."""

    name: str
    """`stop.kind`."""
    function: str
    """One that goes by an acceptance head is called with the head first, and gives the function."""
    settings: tuple[str, ...]
    """Fields of StopConfig that it goes by: at the end its value and what bounds a round, which may
    be the same one."""
    requires: frozenset[Evidence] = frozenset()
    """What it goes by beside depth; a draft that does not show it is refused."""
    shown: str = "{name}({0:g})"
    """Its name in reports, made of the value and the most tokens of a round."""
    greedy_only: bool = False
    """Whether it would bias what is sampled: it goes by the drafted token itself."""

    @property
    def varied(self) -> str:
        """The setting that is its value: a sweep varies it, policy.json must have it."""
        return self.settings[-2:][0]

    def named(self, value: float, longest: int = 0) -> str:
        """Its name in reports with a value, and the most tokens of a round."""
        return self.shown.format(value, longest, name=self.name)

    @property
    def reads_head(self) -> bool:
        """Whether it goes by an acceptance head."""
        return "head" in self.settings


_STOPS, _MOST = "drafttrain.decoding.stopping", "max_draft"
_LOGITS, _HIDDEN, _EXPECTED = (frozenset({name}) for name in ("logits", "hidden", "expected"))

STOPS: dict[str, StopKind] = {
    stop.name: stop
    for stop in (
        StopKind("fixed", f"{_STOPS}:always", ("k",), shown="k={0:g}"),
        StopKind("head", f"{_STOPS}:HeadJudge", ("head", "h", _MOST), _HIDDEN),
        StopKind("entropy", f"{_STOPS}:certain", ("entropy", _MOST), _LOGITS),
        StopKind(
            "confidence", f"{_STOPS}:confident", ("confidence", _MOST), _LOGITS, greedy_only=True
        ),
        StopKind("cumulative", f"{_STOPS}:likely_so_far", ("cumulative", _MOST), _LOGITS),
        StopKind("gain", f"{_STOPS}:gaining", ("delta", _MOST), _EXPECTED, "gain({0:g},{1})"),
    )
}
"""All stop policies by name."""


@dataclass(frozen=True)
class TreeKind:
    """What is known about a kind of tree."""

    name: str
    """`tree.kind`."""
    rule: str
    """The verifier that `auto` is where tokens are sampled."""
    settings: tuple[str, ...] = ()
    """Fields of TreeConfig that it goes by."""
    shape: str | None = None
    """What makes its Shape; None: chains have none."""
    arguments: tuple[str, ...] = ()
    """What that is given: fields of TreeConfig, or `depth` (levels)."""
    draw_kind: DrawKind = "deterministic"
    """How siblings are drawn; deterministic trees are chosen."""
    nodes: Callable[[Any, int], int] = lambda tree, depth: tree.nodes
    """Most tokens of a tree by its TreeConfig and the levels asked for."""
    provides: frozenset[Evidence] = frozenset()
    """What stop policies see of it, beside depth."""
    rule_of_several: str | None = None
    """The verifier where several drafters grow such trees side by side."""

    @property
    def drawn(self) -> bool:
        return self.draw_kind != "deterministic"


_TREE, _WALK = "drafttrain.decoding.trees", "target-walk"

TREES: dict[str, TreeKind] = {
    tree.name: tree
    for tree in (
        TreeKind("none", "rejection", nodes=lambda tree, depth: depth),
        TreeKind(
            "paths",
            "k-seq",
            ("width", "drafters", "draft_temperature"),
            f"{_TREE}.drawn:Paths",
            ("width",),
            "iid",
            lambda tree, depth: tree.width * depth * (1 + len(tree.drafters)),
            rule_of_several="multi-round",
        ),
        TreeKind(
            "rsd-c",
            "recursive",
            ("branching", "draft_temperature"),
            f"{_TREE}.drawn:Branching",
            ("branching",),
            "without_replacement",
            lambda tree, depth: sum(accumulate(tree.branching, mul)),
        ),
        TreeKind(
            "rsd-s",
            "recursive",
            ("width", "draft_temperature"),
            f"{_TREE}.drawn:Beam",
            ("width",),
            "without_replacement",
            lambda tree, depth: tree.width * depth,
        ),
        TreeKind(
            "opt-tree",
            _WALK,
            ("nodes", "draft_temperature"),
            f"{_TREE}.chosen:Optimal",
            ("nodes", "draft_temperature"),
            provides=_EXPECTED,
        ),
        TreeKind("binary", _WALK, ("nodes",), f"{_TREE}.fixed:binary_tree", ("nodes",)),
        TreeKind(
            "eagle", _WALK, shape=f"{_TREE}.fixed:eagle_tree", nodes=lambda tree, depth: EAGLE_NODES
        ),
        TreeKind(
            "sequoia",
            _WALK,
            ("nodes", "by_rank"),
            f"{_TREE}.fixed:best_fixed_tree",
            ("by_rank", "nodes", "depth"),
        ),
    )
}
"""All kinds of trees by name; `none`: the drafts are chains."""


@dataclass(frozen=True)
class VerifierRule:
    """What is known about a rule."""

    name: str
    """`verifier.kind`, and the name in reports."""
    function: str
    accepts_draws: frozenset[DrawKind]
    """Drafts that it is valid for, by how they were drawn."""
    takes_trees: bool = True
    """Whether it is right for drafts that branch."""
    settings: tuple[str, ...] = ()
    """Fields of VerifierConfig that it goes by, arguments of the function."""
    lossless: bool = True
    """Whether the output, or its law, is the target's own."""
    greedy_only: bool = False
    """Whether it is for temperature 0 only; otherwise any temperature is right."""
    accepts: str = ""
    """Of a lossy rule, what it accepts, as a sentence with {settings}; for model cards."""

    def fits(self, greedy: bool, draw_kind: DrawKind) -> bool:
        """Whether it is right for decoding of this kind and drafts so drawn."""
        return draw_kind in self.accepts_draws and (greedy or not self.greedy_only)


_ONE = "drafttrain.decoding.verifiers"
_CHAINS: frozenset[DrawKind] = frozenset({"deterministic", "iid"})
_PATHS: frozenset[DrawKind] = frozenset({"iid", "independent"})
_DISTINCT: frozenset[DrawKind] = frozenset({"without_replacement"})

GREEDY = VerifierRule("greedy", f"{_ONE}:verify_greedy", ANY_DRAW, greedy_only=True)
"""What `auto` is at temperature 0; above it, the kind of tree says which rule fits a draft."""
RULES: dict[str, VerifierRule] = {
    rule.name: rule
    for rule in (
        GREEDY,
        VerifierRule(
            "spec-verification",
            f"{_ONE}:verify_spec",
            ANY_DRAW,
            settings=("beta", "tau"),
            lossless=False,
            greedy_only=True,
            accepts="a drafted token is accepted if it is among the target's top {beta} and within "
            "{tau:g} nats of its first choice",
        ),
        VerifierRule("rejection", f"{_ONE}:verify_rejection", _CHAINS, takes_trees=False),
        VerifierRule("block", f"{_ONE}:verify_block", _CHAINS, takes_trees=False),
        VerifierRule("multi-round", f"{_TREE}.verifiers:verify_multi_round", _PATHS),
        VerifierRule("k-seq", f"{_TREE}.verifiers:verify_k_seq", frozenset({"iid"})),
        VerifierRule("recursive", f"{_TREE}.verifiers:verify_recursive", _DISTINCT),
        VerifierRule("traversal", f"{_TREE}.verifiers:verify_traversal", _PATHS | _DISTINCT),
        VerifierRule("target-walk", f"{_TREE}.verifiers:verify_target_walk", ANY_DRAW),
    )
}
"""All rules by name."""


def rules_for(draw_kind: DrawKind, drafts_trees: bool) -> list[str]:
    """Names of the lossless rules of sampled decoding for trees drawn so; for chains what is for
    them."""
    lossless = [rule for rule in RULES.values() if rule.lossless]
    right = [rule for rule in lossless if rule.fits(False, draw_kind)]
    own = [rule.name for rule in right if rule.takes_trees == drafts_trees]
    return own or [rule.name for rule in right]
