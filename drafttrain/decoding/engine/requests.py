"""One sequence's input and output of a forward call.

A drafter requests the committed tokens that `SequenceState.align` returns, which are not cached.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafttrain.decoding.engine.sequence_state import SequenceState


@dataclass(frozen=True)
class ForwardRequest:
    """New tokens that extend one sequence's cache: a chain, or nodes of a tree."""

    state: SequenceState
    tokens: Sequence[int]
    """[N]."""
    logits_to_keep: int
    """Number of last tokens to compute logits for."""
    visible: Tensor | None = None
    """[N, C + N] bool: which of the C cached and N new columns each token attends to; None: the
    tokens are a chain."""
    positions: Sequence[int] | None = None
    """[N] position of each token; None: they are a chain."""
    embedded: Tensor | None = None
    """[N, D] input embeddings to use instead of those of the tokens."""
    drafted: Tensor | None = None
    """[M] draft tokens after `tokens` that are still on a device."""

    @property
    def size(self) -> int:
        """Number of new tokens."""
        return len(self.tokens) + (0 if self.drafted is None else len(self.drafted))

    @property
    def token_positions(self) -> Sequence[int]:
        """Position of each new token."""
        if self.positions is not None:
            return self.positions
        return range(self.state.cached, self.state.cached + self.size)


@dataclass(frozen=True)
class ForwardOutput:
    """The result of a forward request of F tokens."""

    logits: Tensor
    """[R, V] of the last R tokens, float32 at least. For a proposal (R = N + 1), row 0 follows the
    last committed token and row i + 1 follows draft token i."""
    hidden: Tensor
    """[F, D] last hidden state (after the final norm) of every token; the last R rows correspond
    to the logits."""
    layers: Mapping[int, Tensor] = field(default_factory=dict)
    """[F, D] output of each requested decoder layer."""

    def layer(self, number: int) -> Tensor:
        """Returns the hidden states [F, D] of a layer as `TargetRequirements.layers` numbers it."""
        return self.hidden if number == -1 else self.layers[number]
