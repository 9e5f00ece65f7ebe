"""The target's hidden states and cache, as far as drafters read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from drafttrain.decoding.engine.sequence_state import SequenceState


@dataclass(frozen=True)
class TargetRequirements:
    """What a drafter reads from the target in addition to the emitted tokens."""

    layers: tuple[int, ...] = ()
    """Decoder layers whose hidden states it reads: 0 is the output of the first layer, -1 the last
    hidden state, after the final norm."""
    encoder: bool = False
    """Whether it reads the target's encoder states; they are then in `Source.encoded`."""
    context_layers: tuple[int, ...] = ()
    """Decoder layers whose keys and values its own cache contains for all verified tokens; target
    states then give access to them (`TargetState.columns`)."""

    @staticmethod
    def union(parts: Iterable[TargetRequirements]) -> TargetRequirements:
        """Returns the requirements of several drafters together."""
        parts = list(parts)
        layers = {layer for part in parts for layer in part.layers}
        contexts = {layer for part in parts for layer in part.context_layers}
        encoder = any(part.encoder for part in parts)
        return TargetRequirements(tuple(sorted(layers)), encoder, tuple(sorted(contexts)))


@dataclass(frozen=True)
class TargetState:
    """The target's states at the rows verified in the sequence's last round.

    The first call of the target also gives the rows of the prefix. Inside a cascade a drafter may
    get the same state several times, together with other levels' drafts after the committed tokens.
    """

    committed: int
    """Number of committed tokens, the decoder prefix included. The last one was chosen from the
    last row, so row r of R has position committed - 1 - R + r."""
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    """[R, D] for each layer in `TargetRequirements.layers`."""
    columns: SequenceState | None = None
    """The target's cache of all committed tokens except the last one, valid until the target's next
    call; None if `TargetRequirements.context_layers` is empty."""
