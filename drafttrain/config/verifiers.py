"""The rules of verification, a row each: what the command line, sweeps, trees and policies ask.

A rule is one function `(proposal, target_logits, sampling, randomness, **settings) -> Verdict`. Its
row names it by a dotted path (`module:name`): the table imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.config.kinds import DrawKind

ANY_DRAW: frozenset[DrawKind] = frozenset(
    {"deterministic", "iid", "independent", "without_replacement"}
)


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


_ONE, _TREE = "drafttrain.decoding.verifiers", "drafttrain.decoding.trees.verifiers"
_CHAINS: frozenset[DrawKind] = frozenset({"deterministic", "iid"})
_PATHS: frozenset[DrawKind] = frozenset({"iid", "independent"})
_DISTINCT: frozenset[DrawKind] = frozenset({"without_replacement"})

GREEDY = VerifierRule("greedy", f"{_ONE}:verify_greedy", ANY_DRAW, greedy_only=True)
"""What `auto` is at temperature 0; above it, `config/trees.py` says which rule fits a draft."""
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
        VerifierRule("multi-round", f"{_TREE}:verify_multi_round", _PATHS),
        VerifierRule("k-seq", f"{_TREE}:verify_k_seq", frozenset({"iid"})),
        VerifierRule("recursive", f"{_TREE}:verify_recursive", _DISTINCT),
        VerifierRule("traversal", f"{_TREE}:verify_traversal", _PATHS | _DISTINCT),
        VerifierRule("target-walk", f"{_TREE}:verify_target_walk", ANY_DRAW),
    )
}
"""All rules by name."""


def rules_for(draw_kind: DrawKind, branches: bool) -> list[str]:
    """Names of the lossless rules of sampled decoding for trees drawn so; for chains what is for
    them."""
    lossless = [rule for rule in RULES.values() if rule.lossless]
    right = [rule for rule in lossless if rule.fits(False, draw_kind)]
    own = [rule.name for rule in right if rule.takes_trees == branches]
    return own or [rule.name for rule in right]
