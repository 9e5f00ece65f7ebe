"""The rules of verification, a row each: what the command line, sweeps, trees and policies ask.

A rule is one function `(proposal, target_logits, sampling, randomness, **settings) -> Verdict`. Its
row names it by a dotted path (`module:name`): the table imports nothing heavy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafttrain.config.kinds import DrawKind

ANY_DRAW: frozenset[DrawKind] = frozenset(
    {"deterministic", "iid", "independent", "without_replacement"}
)

DEFERRALS = ("chow", "diff", "opt", "token-v1", "token-v2", "token-v3")
"""When a speculative cascade defers to the target; `decoding/deferral.py` has the rules."""


@dataclass(frozen=True)
class RuleSetting:
    """A number or a word that a rule goes by: a field of VerifierConfig and an argument of the
    function."""

    name: str
    type: type[int] | type[float] | type[str]
    least: float | None = None
    """Of a number; None: any finite one."""
    choices: tuple[str, ...] = ()
    """Of a word."""

    def allows(self, value: float | str) -> bool:
        if isinstance(value, str):
            return value in self.choices
        return math.isfinite(value) if self.least is None else value >= self.least

    @property
    def needed(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            return f"{self.name} to be one of {', '.join(self.choices)}"
        if self.least is None:
            return f"a finite {self.name}"
        return f"{self.name} >= {self.least:g}"


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
    settings: tuple[RuleSetting, ...] = ()
    lossless: bool = True
    """Whether the output, or its law, is the target's own."""
    greedy_only: bool = False
    """Whether it is for temperature 0 only; otherwise any temperature is right."""
    needs_rows: bool = False
    """Whether it goes by the drafter's rows before warping (`Proposal.logits`), in greedy decoding
    too; drafters that do not show theirs are refused."""
    adds_token: bool = True
    """Whether one more token follows a draft that is accepted whole. Otherwise a draft's last token
    is not fed to the target, whose row behind it is not needed."""
    accepts: str = ""
    """Of a lossy rule, what it accepts, as a sentence with {settings}; for model cards."""
    paper: str = ""
    """Of a lossy rule, where it is from."""

    def fits(self, greedy: bool, draw_kind: DrawKind) -> bool:
        """Whether it is right for decoding of this kind and drafts so drawn."""
        return draw_kind in self.accepts_draws and (greedy or not self.greedy_only)


GREEDY = VerifierRule(
    "greedy", "drafttrain.decoding.verifiers:verify_greedy", ANY_DRAW, greedy_only=True
)
"""What `auto` is at temperature 0; above it, `config/trees.py` says which rule fits a draft."""

RULES: dict[str, VerifierRule] = {
    rule.name: rule
    for rule in (
        GREEDY,
        VerifierRule(
            "spec-verification",
            "drafttrain.decoding.verifiers:verify_spec",
            ANY_DRAW,
            settings=(RuleSetting("beta", int, 1), RuleSetting("tau", float, 0.0)),
            lossless=False,
            greedy_only=True,
            accepts="a drafted token is accepted if it is among the target's top {beta} and within "
            "{tau:g} nats of its first choice",
            paper="SpecDec, arXiv 2203.16487",
        ),
        VerifierRule(
            "deferral",
            "drafttrain.decoding.deferral:verify_deferral",
            frozenset({"deterministic", "iid"}),
            takes_trees=False,
            settings=(
                RuleSetting("rule", str, choices=DEFERRALS),
                RuleSetting("alpha", float),
            ),
            lossless=False,
            needs_rows=True,
            adds_token=False,
            accepts="the drafter's own choice stands wherever the rule {rule} with alpha "
            "{alpha:g} does not defer to the target",
            paper="speculative cascades, arXiv 2405.19261",
        ),
        VerifierRule(
            "rejection",
            "drafttrain.decoding.verifiers:verify_rejection",
            frozenset({"deterministic", "iid"}),
            takes_trees=False,
        ),
        VerifierRule(
            "block",
            "drafttrain.decoding.verifiers:verify_block",
            frozenset({"deterministic", "iid"}),
            takes_trees=False,
        ),
        VerifierRule(
            "multi-round",
            "drafttrain.decoding.trees.verifiers:verify_multi_round",
            frozenset({"iid", "independent"}),
        ),
        VerifierRule(
            "k-seq", "drafttrain.decoding.trees.verifiers:verify_k_seq", frozenset({"iid"})
        ),
        VerifierRule(
            "recursive",
            "drafttrain.decoding.trees.verifiers:verify_recursive",
            frozenset({"without_replacement"}),
        ),
        VerifierRule(
            "traversal",
            "drafttrain.decoding.trees.verifiers:verify_traversal",
            frozenset({"iid", "independent", "without_replacement"}),
        ),
        VerifierRule(
            "target-walk", "drafttrain.decoding.trees.verifiers:verify_target_walk", ANY_DRAW
        ),
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
