"""Teacher-forced drafting: what a drafter proposes after each prefix of a known target output.

Acceptance heads train on these drafts, and teacher-forced acceptance is measured on them. A drafter
kind that supports this has a function (`DrafterKind.teacher_forced_probs`) of the drafter, the
output [L], the longest draft at each prefix [L] and the sampling. Sequences share its model calls
(`batching.BatchedSteps`). It returns probabilities [L, K] in float64, where K >= 1 is the largest
of these lengths: entry (p, d) is the probability that a draft after the first p tokens of the
output holds the output's token p + d at draft position d, given that the earlier draft positions
hold the output's tokens. In greedy decoding it is 1 or 0. It is 0 after the end of the output,
where every token is wrong, and NOT_DRAFTED at positions past the end of the draft.
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
    """An output of the target, with the target states that drafters read."""

    source: Source
    """As read by the target (`CachedModel.read`)."""
    tokens: Tensor
    """[L], on the CPU."""
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    """[P + L - 1, D] hidden states of each required layer, at all tokens except the last."""
    columns: SequenceState | None = None
    """The target's KV cache of the same tokens, if the drafter reads it."""

    def committed(self, prefix: int) -> Tensor:
        """Returns the committed tokens [T] after the first `prefix` tokens of the output."""
        return torch.cat((self.source.prefix.cpu(), self.tokens[:prefix]))


@torch.inference_mode()
def read_outputs(
    target: CachedModel,
    sources: Sequence[Source],
    outputs: Sequence[Sequence[int] | Tensor],
    requires: TargetRequirements,
) -> list[KnownOutput]:
    """Collects the target states that a drafter requires along known outputs.

    Runs one target forward pass, or none if no states are required. sources: as read by the target.
    Shapes: outputs [L] each.
    """
    tokens = [torch.as_tensor(output, dtype=torch.long).cpu() for output in outputs]
    known = [KnownOutput(*pair) for pair in zip(sources, tokens, strict=True)]
    if not requires.layers and not requires.context_layers:
        return known
    states = target.encode_all(sources)
    requests = [
        ForwardRequest(state, one.committed(len(one.tokens) - 1).tolist(), 0)
        for state, one in zip(states, known, strict=True)
    ]
    results = target.forward_batch(requests, requires.layers)
    return [
        KnownOutput(one.source, one.tokens, {n: result.layer(n) for n in requires.layers}, state)
        for one, state, result in zip(known, states, results, strict=True)
    ]


class TeacherForcedSession:
    """A drafting session that is called at increasing prefixes of a known output."""

    def __init__(self, drafter: Drafter, known: KnownOutput, sampling: Sampling) -> None:
        self.known = known
        self.session = drafter.open(known.source, sampling, SampledRandomness(torch.Generator()))
        self._seen = 0
        """Number of committed tokens at the last call."""

    def _state(self, tokens: Tensor, prefix: int) -> TargetState | None:
        """Returns the target state for the tokens committed since the last call; None before the
        target's first forward pass."""
        if prefix == 0:
            return None
        first, self._seen = self._seen, len(tokens)
        rows = slice(max(first - 1, 0), len(tokens) - 1)
        hidden = {layer: states[rows] for layer, states in self.known.hidden.items()}
        return TargetState(len(tokens), hidden, self.known.columns)

    def draft(self, prefix: int, most: int) -> BatchedSteps[Tensor]:
        """Drafts up to `most` tokens [N]."""
        tokens = self.known.committed(prefix)
        if most == 0:
            return torch.empty(0, dtype=torch.long)
        drafted = self.session.propose(tokens, self._state(tokens, prefix), FixedLength(most))
        return (yield from as_steps(drafted)).tokens

    def slots(self, prefix: int, most: int) -> BatchedSteps[Tensor]:
        """Returns the logits [N, V] of a block of up to `most` slots, given the output's tokens."""
        session, tokens = self.session, self.known.committed(prefix)
        assert isinstance(session, SlotSession)
        count = session.longest(tokens, most, self._state(tokens, prefix))
        if count == 0:
            return torch.empty(0, 0)
        states, rows = yield from session.slot_rows(tokens, count)
        if session.correction is not None:
            output = self.known.tokens
            previous = torch.arange(prefix - 1, prefix + count - 1).clamp(0, len(output) - 1)
            before = output[previous]
            before[0] = session.token_before(tokens)
            rows = session.correction.after(states, rows, before.to(rows.device))
        return rows


def teacher_forced_probs(
    drafter: Drafter, known: KnownOutput, longest: Sequence[int], sampling: Sampling
) -> BatchedSteps[Tensor]:
    """Probabilities of the output's own tokens, for block drafters and deterministic drafters."""
    tokens, session = known.tokens, TeacherForcedSession(drafter, known, sampling)
    probs = torch.full((len(tokens), max(longest)), NOT_DRAFTED, dtype=torch.double)
    for prefix, most in enumerate(longest):
        if isinstance(session.session, SlotSession):
            drafted = yield from session.slots(prefix, most)
        else:
            drafted = yield from session.draft(prefix, most)
        expected = tokens[prefix : prefix + len(drafted)]
        count = len(expected)
        probs[prefix, : len(drafted)] = 0.0
        if drafted.dim() == 1:
            probs[prefix, :count] = (drafted[:count] == expected).double()
        elif count > 0:
            probs[prefix, :count] = probs_of_tokens(drafted[:count], expected, sampling)
    return probs
