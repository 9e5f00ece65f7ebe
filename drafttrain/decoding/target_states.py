"""What drafters may read of the target, beside the tokens that it emits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from drafttrain.decoding.engine.sequence_state import SequenceState


@dataclass(frozen=True)
class TargetRequirements:
    """What a drafter reads of the target, beside the tokens that it emits."""

    layers: tuple[int, ...] = ()
    """Layers whose hidden states it reads: 0 is the first decoder layer's output, -1 the last
    hidden state, after the final norm."""
    encoder: bool = False
    """Whether it reads the encoder's output: its sequences' sources then hold that."""
    context_layers: tuple[int, ...] = ()
    """Decoder layers whose keys and values of all that is verified its own cache has: target states
    then have them at hand."""
    first_row: bool = False
    """Whether nothing is drafted before the target's first call."""

    @staticmethod
    def union(parts: Iterable[TargetRequirements]) -> TargetRequirements:
        """What several drafters read together."""
        parts = list(parts)
        layers = sorted({layer for part in parts for layer in part.layers})
        contexts = sorted({layer for part in parts for layer in part.context_layers})
        encoder = any(part.encoder for part in parts)
        waits = any(part.first_row for part in parts)
        return TargetRequirements(tuple(layers), encoder, tuple(contexts), waits)


@dataclass(frozen=True)
class TargetState:
    """The target's states at the rows verified since the sequence's last round.

    After the target's first call these are the prefix's rows too. The last committed token has no
    row yet: it came from the last one. Inside a cascade a drafter may be shown the same state
    several times, and more tokens than are committed: drafts that others put behind them.
    """

    committed: int
    """Tokens of the sequence, the decoder prefix included, the last of which came from the last
    row: row r of R stands at position committed - 1 - R + r."""
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    """[R, D] of each layer that the drafter asked for (`TargetRequirements`)."""
    columns: SequenceState | None = None
    """The target's cache, where the drafter asked for layers of it: of all committed tokens but the
    last one; until the target's next call."""
