"""The roles of a round of speculative decoding, and the interface for their random choices.

A *drafter* proposes a tree of tokens (a chain is a tree of width one), a *stop policy* decides how
far to draft, and a *verifier* chooses the accepted path and the bonus token. Every method is a
triple of these. `decoding/loop.py` runs them; `decoding/types.py` has the data that they exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from drafttrain.config.kinds import KINDS, DrawKind, Evidence, StateKind
from drafttrain.config.methods import StopKind, VerifierRule
from drafttrain.decoding.batching import BatchedSteps, run_single
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source, Verdict


class Randomness(Protocol):
    """The source of every random choice in drafting and verification.

    `SampledRandomness` draws from a `torch.Generator`. The tests' `EnumeratedRandomness` visits
    every outcome with its probability, which proves exactness on the production code.
    """

    def categorical(self, probs: Tensor) -> Tensor:
        """Samples one index per row. Shapes: probs [R, V] -> [R]."""

    def accept_run(self, probs: Tensor) -> int:
        """Samples N independent events and returns how many occur before the first that does not.

        Shapes: probs [N], the probability of each event -> a count in 0..N.
        """

    def without_replacement(self, probs: Tensor, count: int) -> Tensor:
        """Samples distinct indices per row, in the order drawn; -1 if no probability is left.

        Shapes: probs [R, V] -> [R, count], count at most V.
        """

    def gumbel(self, like: Tensor) -> Tensor:
        """Samples independent standard Gumbel values in the shape of `like`."""


@dataclass(frozen=True)
class StopPolicy:
    """Decides before each draft token (or slot) whether to draft it.

    It never sees the value of that token, so stopping cannot bias the output.
    """

    rule: StopKind
    continues: Callable[[DraftState, float], bool]
    """(state, value) -> whether to draft one more token."""
    value: float
    """The second argument of `continues`: the policy's threshold, or k (`StopKind.varied`)."""
    longest: int
    """Maximal number of draft tokens (levels of a tree) in a round; a block has as many slots."""
    state_kind: StateKind | None = None
    """The kind of hidden states that it reads from `DraftState.hidden`; None: it reads none."""

    @property
    def name(self) -> str:
        """The name in reports, for example `k=10` or `head(0.7)`."""
        return self.rule.named(self.value, self.longest)

    def should_draft(self, state: DraftState) -> bool:
        """Returns whether to draft token number depth + 1."""
        return state.depth < self.longest and self.continues(state, self.value)

    def capped(self, limit: int) -> StopPolicy:
        """Returns the same policy with at most `limit` draft tokens per round.

        The limit depends on no token's value, so it cannot bias the output.
        """
        return self if limit >= self.longest else replace(self, longest=limit)


class DraftSession(Protocol):
    """A drafter's state for one sequence."""

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal] | Proposal:
        """Drafts a continuation of the committed tokens [T], which include the decoder prefix.

        Drafters that call a model yield each call as a `BatchedCall`, which is then batched across
        sequences. target_state is None before the target's first call.
        """


class Drafter(Protocol):
    """Proposes draft tokens. The defaults of its properties come from its row in `KINDS`."""

    name: str
    session: Callable[[Any, Source, Sampling, Randomness], DraftSession]
    """Class of its sessions, which `open` makes from the drafter and its own arguments."""
    requires: TargetRequirements = TargetRequirements()
    """The target's states that it reads; only these are kept after a call."""
    drafts_trees: bool = False
    """Whether its drafts are trees wider than a chain."""

    @property
    def provides(self) -> frozenset[Evidence]:
        """The fields of `DraftState`, besides depth, that it fills for stop policies."""
        return KINDS[self.name].provides

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        """Returns how it draws draft tokens under this sampling."""
        return KINDS[self.name].draw_kind(sampling.greedy)

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> DraftSession:
        """Starts a sequence, whose random choices all come from `randomness`.

        Raises SourceTooLong if the source is longer than the drafter accepts.
        """
        return self.session(self, source, sampling, randomness)


@dataclass(frozen=True)
class Verifier:
    """A verification rule and its settings: accepts a path of a proposal and adds one token."""

    rule: VerifierRule
    function: Callable[..., BatchedSteps[Verdict] | Verdict]
    """(proposal, target_logits, sampling, randomness, **settings) -> a Verdict, or a generator that
    yields batched calls and returns one."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Values of the rule's settings by name."""

    @property
    def name(self) -> str:
        """The name in reports, for example `greedy` or `spec-verification(3,1.0)`."""
        values = ",".join(map(str, self.settings.values()))
        return f"{self.rule.name}({values})" if values else self.rule.name

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    def verify(
        self, proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
    ) -> Verdict:
        """Applies the rule to one sequence's draft.

        Row 0 of target_logits [N + 1, V] verifies the roots, row i + 1 the children of node i. The
        target's logits processors have been applied to the logits, the temperature has not.
        """
        return run_single(self.steps(proposal, target_logits, sampling, randomness))

    def steps(self, *arguments: object) -> BatchedSteps[Verdict] | Verdict:
        """Same as `verify`, for verification that is batched across sequences."""
        return self.function(*arguments, **self.settings)
