"""Teacher-forced drafting: what a drafter proposes after each prefix of a known target output.

Acceptance heads learn from these drafts, and teacher-forced acceptance measures them. A drafter
kind that supports this has a function (`DrafterKind.teacher_forced_probs`) of the drafter, the
output [L], the longest draft at each prefix [L] and the sampling. Sequences share its model calls
(`batching.BatchedSteps`). It returns probabilities [L, K] in float64, where K >= 1 is the largest
of these lengths: entry (p, d) is the probability that a draft after the first p tokens of the
output holds the output's token p + d at draft position d, given that the draft positions before
hold the output's tokens. In greedy decoding it is 1 or 0. It is 0 after the end of the output,
where every token is wrong, and NOT_DRAFTED at positions that a draft does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.decoding.batching import BatchedSteps, as_steps
from drafttrain.decoding.drafters.slots import SlotSession
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import SampledRandomness, probs_of_tokens
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import Sampling, Source

NOT_DRAFTED = -1.0


@dataclass(frozen=True)
class KnownOutput:
    """An output of the target, and what drafters read of the target along it."""

    source: Source
    """As the target has read it (`CachedModel.read`)."""
    tokens: Tensor
    """[L], on the CPU."""
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    """[P + L - 1, D] of each layer that is read, at all tokens but the last."""
    columns: SequenceState | None = None
    """The target's cache of the same tokens, where layers of it are read."""

    def committed(self, prefix: int) -> Tensor:
        """All committed tokens [T] once decoding has emitted `prefix` tokens of the output."""
        return torch.cat((self.source.prefix.cpu(), self.tokens[:prefix]))


@torch.inference_mode()
def read_outputs(
    target: CachedModel,
    sources: Sequence[Source],
    outputs: Sequence[Sequence[int] | Tensor],
    wanted: TargetRequirements,
) -> list[KnownOutput]:
    """Known outputs for drafters that read this of the target; one pass, where they read any.

    sources: as the target has read them. Shapes: outputs [L] each.
    """
    tokens = [torch.as_tensor(output, dtype=torch.long).cpu() for output in outputs]
    known = [KnownOutput(*pair) for pair in zip(sources, tokens, strict=True)]
    if not wanted.layers and not wanted.context_layers:
        return known
    states = target.encode_all(sources)
    requests = [
        ForwardRequest(state, one.committed(len(one.tokens) - 1).tolist(), 0)
        for state, one in zip(states, known, strict=True)
    ]
    read = target.forward_batch(requests, wanted.layers)
    return [
        KnownOutput(one.source, one.tokens, {n: found.layer(n) for n in wanted.layers}, state)
        for one, state, found in zip(known, states, read, strict=True)
    ]


class TeacherForcedSession:
    """One session of a drafter, called at rising prefixes of a known output."""

    def __init__(self, drafter: Drafter, known: KnownOutput, sampling: Sampling) -> None:
        self.known = known
        self.session = drafter.open(known.source, sampling, SampledRandomness(torch.Generator()))
        self._seen = 0
        """Committed tokens at its last call."""

    def _state(self, tokens: Tensor, prefix: int) -> TargetState | None:
        """What the target shows of the tokens committed since; None before its first call."""
        if prefix == 0:
            return None
        first, self._seen = self._seen, len(tokens)
        rows = slice(max(first - 1, 0), len(tokens) - 1)
        hidden = {layer: states[rows] for layer, states in self.known.hidden.items()}
        return TargetState(len(tokens), hidden, self.known.columns)

    def draft(self, prefix: int, most: int) -> BatchedSteps[Tensor]:
        """A draft [N] of up to `most` tokens."""
        tokens = self.known.committed(prefix)
        if most == 0:
            return torch.empty(0, dtype=torch.long)
        drafted = self.session.propose(tokens, self._state(tokens, prefix), FixedLength(most))
        return (yield from as_steps(drafted)).tokens

    def slots(self, prefix: int, most: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        """A block of up to `most` slots: their states, before a token is drawn, and their rows
        after the output's own tokens. Shapes: -> [N, D], [N, V]."""
        session, tokens = self.session, self.known.committed(prefix)
        assert isinstance(session, SlotSession)
        count = session.longest(tokens, most, self._state(tokens, prefix))
        if count == 0:
            return torch.empty(0, 0), torch.empty(0, 0)
        states, rows = yield from session.slot_rows(tokens, count)
        if session.correction is not None:
            own = self.known.tokens
            before = own[torch.arange(prefix - 1, prefix + count - 1).clamp(0, len(own) - 1)]
            before[0] = session.token_before(tokens)
            rows = session.correction.after(states, rows, before.to(rows.device))
        return states, rows


def teacher_forced_probs(
    drafter: Drafter, known: KnownOutput, longest: Sequence[int], sampling: Sampling
) -> BatchedSteps[Tensor]:
    """The same of drafters of slots, and of those whose drafts have no chance in them."""
    tokens, session = known.tokens, TeacherForcedSession(drafter, known, sampling)
    found = torch.full((len(tokens), max(longest)), NOT_DRAFTED, dtype=torch.double)
    for prefix, most in enumerate(longest):
        if isinstance(session.session, SlotSession):
            _, drafted = yield from session.slots(prefix, most)
        else:
            drafted = yield from session.draft(prefix, most)
        own = tokens[prefix : prefix + len(drafted)]
        found[prefix, : len(drafted)] = 0.0
        if drafted.dim() == 1:
            found[prefix, : len(own)] = (drafted[: len(own)] == own).double()
        elif len(own) > 0:
            found[prefix, : len(own)] = probs_of_tokens(drafted[: len(own)], own, sampling)
    return found
