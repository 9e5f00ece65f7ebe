"""What a model is fed in one call, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafttrain.decoding.engine.sequence_state import SequenceState


@dataclass(frozen=True)
class ForwardRequest:
    """Tokens that follow what is cached of one sequence: a chain, or branches."""

    state: SequenceState
    tokens: Sequence[int]
    """[N]."""
    logits_to_keep: int
    """So many of the last ones are given logits."""
    visible: Tensor | None = None
    """[N, C + N] bool, which of C cached and N new columns each sees; None: they are a chain."""
    positions: Sequence[int] | None = None
    """[N] where they stand; None: they are a chain."""
    embedded: Tensor | None = None
    """[N, D] what is fed instead of the embedded tokens."""
    states: Tensor | None = None
    """[M, E] target hidden states that come with the first M tokens."""
    drafted: Tensor | None = None
    """[M] more tokens after these, which a device drafted and the host does not know."""

    @property
    def size(self) -> int:
        """Tokens that it feeds."""
        return len(self.tokens) + (0 if self.drafted is None else len(self.drafted))

    @property
    def token_positions(self) -> Sequence[int]:
        """[N] where they stand."""
        if self.positions is not None:
            return self.positions
        return range(self.state.cached, self.state.cached + self.size)


@dataclass(frozen=True)
class ForwardOutput:
    """What a model says after the tokens it was fed; the last rows of both belong together."""

    logits: Tensor
    """[R, V], float32 at least. Of a proposal (R = N + 1): row 0 follows the last committed token,
    row i + 1 follows draft token i."""
    hidden: Tensor
    """[F, D] last hidden state (after the final norm) of every token fed; its last rows belong to
    the logits."""
    layers: Mapping[int, Tensor] = field(default_factory=dict)
    """[F, D] outputs of single decoder layers, where they were asked for."""

    def layer(self, number: int) -> Tensor:
        """[F, D] what `TargetRequirements` calls this layer."""
        return self.hidden if number == -1 else self.layers[number]
