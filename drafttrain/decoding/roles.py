"""The roles of a round of speculative decoding, and what all their random choices go through.

A *drafter* proposes a tree of tokens (a chain is a tree of width one), a *stop policy* says how far
to draft, a *verifier* decides the accepted path and one more token. Every method in drafttrain is a
triple of these; `decoding/loop.py` is the one loop that runs them on the plain data of
`decoding/types.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from drafttrain.config.kinds import KINDS, DrawKind, Evidence, StateKind
from drafttrain.config.methods import StopKind, VerifierRule
from drafttrain.decoding.batching import BatchedSteps, run_single
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source, Verdict


class Randomness(Protocol):
    """Every random choice of drafting and verification goes through here.

    `SampledRandomness` draws from a `torch.Generator`; the tests' `EnumeratedRandomness` visits
    every outcome with its probability, so that exactness is proven on the production code.
    """

    def categorical(self, probs: Tensor) -> Tensor:
        """One index from each row. Shapes: probs [R, V] -> [R]."""
        ...

    def accept_run(self, probs: Tensor) -> int:
        """How many independent events in a row come true before the first that does not.

        Shapes: probs [N], probability of each -> a count in 0..N.
        """
        ...

    def without_replacement(self, probs: Tensor, count: int) -> Tensor:
        """Indices drawn one after another from each row, none twice; -1 where none is left.

        Shapes: probs [R, V] -> [R, count], count at most V.
        """
        ...

    def gumbel(self, like: Tensor) -> Tensor:
        """Independent draws of the standard Gumbel distribution, of the shape of `like`."""
        ...


@dataclass(frozen=True)
class StopPolicy:
    """Says, before each token (or slot) is drafted, whether to draft it.

    It is never shown the token's own value, so stopping cannot bias the output.
    """

    rule: StopKind
    goes_on: Callable[[DraftState, float], bool]
    """(state, value) -> whether to draft one more token."""
    value: float
    """The setting that it goes by (`StopKind.varied`)."""
    longest: int
    """Most tokens (levels of a tree) of a round, whatever is seen: a block has so many slots."""
    state_kind: StateKind | None = None
    """The kind of states that a drafter is to show it; None: it looks at none."""

    @property
    def name(self) -> str:
        """As reports have it: `k=10`, `head(0.7)`."""
        return self.rule.named(self.value, self.longest)

    def should_draft(self, state: DraftState) -> bool:
        return state.depth < self.longest and self.goes_on(state, self.value)

    def capped(self, limit: int) -> StopPolicy:
        """The same, but never more than so many tokens, what is left to generate, say.

        The limit counts tokens and knows none of their values, so it cannot bias the output.
        """
        return self if limit >= self.longest else replace(self, longest=limit)


class DraftSession(Protocol):
    """A drafter's state for one sequence."""

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal] | Proposal:
        """Draft a continuation of all committed tokens ([T], the decoder prefix included).

        Drafters that call a model yield these calls (`BatchedCall`), so that sequences share them.
        target_state is None before the target's first call.
        """
        ...


class Drafter(Protocol):
    """What proposes tokens. One of a kind of its own has what the kind's row says (`KINDS`)."""

    name: str
    requires: TargetRequirements = TargetRequirements()
    """What it reads of the target; nothing else is kept for it."""
    drafts_trees: bool = False
    """Whether its drafts are trees wider than a chain."""
    lengths_differ: bool = False
    """Whether a draft of k tokens is not the beginning of a longer one, as slots see each other."""

    @property
    def provides(self) -> frozenset[Evidence]:
        """What stop policies see of its drafts, in addition to depth."""
        return KINDS[self.name].provides

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        """How tokens will be drawn when the target decodes so; checked before anything runs."""
        return KINDS[self.name].draw_kind(sampling.greedy)

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> DraftSession:
        """Begin a sequence. All its random choices are taken from `randomness`."""
        ...


@dataclass(frozen=True)
class Verifier:
    """A verification rule with its settings: accepts a path of a proposal and adds one token."""

    rule: VerifierRule
    function: Callable[..., BatchedSteps[Verdict] | Verdict]
    """(proposal, target_logits, sampling, randomness, **settings) -> a Verdict, or steps to one
    that share calls with other sequences."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Those of the rule, by name."""

    @property
    def name(self) -> str:
        """As reports have it: `greedy`, `spec-verification(3,1.0)`."""
        values = ",".join(map(str, self.settings.values()))
        return f"{self.rule.name}({values})" if values else self.rule.name

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    def __str__(self) -> str:
        return self.name

    def verify(
        self, proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
    ) -> Verdict:
        """`judge` of one sequence."""
        return run_single(self.judge(proposal, target_logits, sampling, randomness))

    def judge(
        self, proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
    ) -> BatchedSteps[Verdict] | Verdict:
        """Row 0 of target_logits [N + 1, V] judges the roots, row i + 1 the children of node i.

        The logits have been through the target's logits processors, before temperature.
        """
        return self.function(proposal, target_logits, sampling, randomness, **self.settings)
