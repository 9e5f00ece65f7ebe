"""Tables of stop policies, draft trees and verifiers.

A row has the properties that settings, sweeps, policy.json and checks need. Policies and verifiers
are functions: a policy `(state, value) -> bool` returns whether to draft one more token; a verifier
is `(proposal, target_logits, sampling, randomness, **settings) -> Verdict`. Rows name functions by
dotted paths (`module:name`), so that the tables import nothing heavy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, get_args

from drafttrain.config.kinds import DrawKind, Evidence

ANY_DRAW: frozenset[DrawKind] = frozenset(get_args(DrawKind))


@dataclass(frozen=True)
class StopKind:
    """The properties of a stop policy."""

    name: str
    """The value of `stop.kind`."""
    function: str
    """Function (state, value) -> bool, or a class that makes it from an acceptance head."""
    settings: tuple[str, ...]
    """Fields of StopConfig that it uses. The last two are its value and the maximal draft length; a
    single field is both."""
    requires: frozenset[Evidence] = frozenset()
    """Fields of `DraftState` that it reads in addition to depth; drafts must provide them."""
    shown: str = "{name}({0:g})"
    """Format of its name in reports, from the value and the maximal draft length."""
    greedy_only: bool = False
    """Whether it is exact in greedy decoding only, because it depends on the drafted token."""

    @property
    def varied(self) -> str:
        """The setting that is its value: sweeps vary it, and policy.json must contain it."""
        return self.settings[-2:][0]

    def named(self, value: float, longest: int = 0) -> str:
        """Returns its name in reports for a value and a maximal draft length."""
        return self.shown.format(value, longest, name=self.name)

    @property
    def reads_head(self) -> bool:
        """Whether it needs an acceptance head."""
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
    """The properties of a kind of draft tree."""

    name: str
    """The value of `tree.kind`."""
    rule: str
    """The verifier that `auto` stands for in sampled decoding."""
    settings: tuple[str, ...] = ()
    """Fields of TreeConfig that it uses."""
    shape: str | None = None
    """Function that makes its Shape; None for chains."""
    arguments: tuple[str, ...] = ()
    """Arguments of `shape`: names of TreeConfig fields, or `depth` (number of levels)."""
    draw_kind: DrawKind = "deterministic"
    """How siblings are drawn; deterministic trees are not sampled."""
    nodes: Callable[[Any, int], int] = lambda tree, depth: tree.nodes
    """Function (TreeConfig, levels) that returns the maximal number of draft tokens."""
    provides: frozenset[Evidence] = frozenset()
    """Fields of `DraftState` that it provides in addition to depth."""
    rule_of_several: str | None = None
    """The verifier for trees of several drafters; None: the same as `rule`."""

    @property
    def drawn(self) -> bool:
        return self.draw_kind != "deterministic"

    @property
    def stop(self) -> str:
        """The default stop policy: gain for trees that estimate their acceptance (OPT-Tree)."""
        return "gain" if "expected" in self.provides else "fixed"


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
        TreeKind("eagle", _WALK, shape=f"{_TREE}.fixed:eagle_tree", nodes=lambda tree, depth: 25),
        TreeKind(
            "sequoia",
            _WALK,
            ("nodes", "by_rank"),
            f"{_TREE}.fixed:best_fixed_tree",
            ("by_rank", "nodes", "depth"),
        ),
    )
}
"""All kinds of trees by name; `none` means chains."""


@dataclass(frozen=True)
class VerifierRule:
    """The properties of a verifier."""

    name: str
    """The value of `verifier.kind` and the name in reports."""
    function: str
    accepts_draws: frozenset[DrawKind]
    """How siblings must be drawn for it to be valid."""
    takes_trees: bool = True
    """Whether it is valid for draft trees."""
    settings: tuple[str, ...] = ()
    """Fields of VerifierConfig that it uses as arguments of the function."""
    lossless: bool = True
    """Whether greedy outputs, or the distribution of sampled ones, are those of the target."""
    greedy_only: bool = False
    """Whether it is valid at temperature 0 only; else at any temperature."""
    accepts: str = ""
    """For a lossy verifier, a sentence for model cards on what it accepts, with {settings}."""

    def fits(self, greedy: bool, draw_kind: DrawKind) -> bool:
        """Whether it is valid for greedy or sampled decoding with drafts drawn this way."""
        return draw_kind in self.accepts_draws and (greedy or not self.greedy_only)


_ONE = "drafttrain.decoding.verifiers"
_CHAINS: frozenset[DrawKind] = frozenset({"deterministic", "iid"})
_PATHS: frozenset[DrawKind] = frozenset({"iid", "independent"})
_DISTINCT: frozenset[DrawKind] = frozenset({"without_replacement"})

GREEDY = VerifierRule("greedy", f"{_ONE}:verify_greedy", ANY_DRAW, greedy_only=True)
"""The verifier that `auto` stands for at temperature 0; above it, `TreeKind.rule` names one."""
RULES: dict[str, VerifierRule] = {
    rule.name: rule
    for rule in (
        GREEDY,
        VerifierRule(
            "spec-verification",
            f"{_ONE}:verify_spec",
            ANY_DRAW,
            takes_trees=False,
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
        VerifierRule("target-walk", f"{_TREE}.verifiers:verify_target_walk", ANY_DRAW),
    )
}
"""All verifiers by name."""


def rules_for(draw_kind: DrawKind, drafts_trees: bool) -> list[str]:
    """Returns the names of lossless verifiers for sampled decoding with drafts drawn this way.

    Verifiers for chains only are preferred for chains, and left out for trees.
    """
    valid = [rule for rule in RULES.values() if rule.lossless and rule.fits(False, draw_kind)]
    preferred = [rule.name for rule in valid if rule.takes_trees == drafts_trees]
    return preferred or [rule.name for rule in valid]
