"""Teacher-forced drafting: what a drafter proposes after each prefix of a known target output.

Teacher-forced acceptance is measured on these drafts. A drafter kind that supports this has a
function (`DrafterKind.teacher_forced_probs`) of the drafter, the output [L], the longest draft at
each prefix [L] and the sampling. Sequences share its model calls (`batching.BatchedSteps`). It
returns probabilities [L, K] in float64, where K >= 1 is the largest of these lengths: entry (p, d)
is the probability that a draft after the first p tokens of the output holds the output's token
p + d at draft position d, given that the earlier draft positions hold the output's tokens. In
greedy decoding it is 1 or 0. It is 0 after the end of the output, where every token is wrong, and
NOT_DRAFTED at positions past the end of the draft.
"""

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


def teacher_forced_probs(
    drafter: Drafter, known: KnownOutput, longest: Sequence[int], sampling: Sampling
) -> BatchedSteps[Tensor]:
    """Probabilities of the output's own tokens, for block drafters and deterministic drafters.

    One session drafts at increasing prefixes, and gets the target's states of the tokens committed
    since its last draft; None before the target's first forward pass.
    """
    session = drafter.open(known.source, sampling, SampledRandomness(torch.Generator()))
    probs = torch.full((len(known.tokens), max(longest)), NOT_DRAFTED, dtype=torch.double)
    seen = 0
    for prefix, most in enumerate(longest):
        if most == 0:
            continue
        tokens, state = known.committed(prefix), None
        if prefix > 0:
            rows, seen = slice(max(seen - 1, 0), len(tokens) - 1), len(tokens)
            hidden = {layer: states[rows] for layer, states in known.hidden.items()}
            state = TargetState(len(tokens), hidden, known.columns)
        expected = known.tokens[prefix:]
        if isinstance(session, SlotSession):
            slots = session.longest(tokens, most, state)
            if slots == 0:
                continue
            logits = yield from _slot_logits(session, known, prefix, slots)
            own = probs_of_tokens(logits[: len(expected)], expected[:slots], sampling)
        else:
            draft = yield from as_steps(session.propose(tokens, state, FixedLength(most)))
            slots = len(draft.tokens)
            own = (draft.tokens[: len(expected)] == expected[:slots]).double()
        probs[prefix, :slots] = 0.0
        probs[prefix, : len(own)] = own
    return probs


def _slot_logits(
    session: SlotSession, known: KnownOutput, prefix: int, slots: int
) -> BatchedSteps[Tensor]:
    """Returns the logits of a block's slots, given the output's tokens. Shapes: -> [slots, V]."""
    tokens, output = known.committed(prefix), known.tokens
    states, logits = yield from session.slot_rows(tokens, slots)
    if session.correction is None:
        return logits
    before = output[torch.arange(prefix - 1, prefix + slots - 1).clamp(0, len(output) - 1)]
    before[0] = session.token_before(tokens)
    return session.correction.after(states, logits, before.to(logits.device))
