"""Rounds of a replayed trace and of real decoding, to be compared."""

from __future__ import annotations

import numpy as np
import torch

from drafttrain.decoding.types import Output
from drafttrain.evaluation.stops.decoded import Drafting, count_chain
from drafttrain.evaluation.stops.replay import (
    Candidate,
    PolicyCounts,
    draft_lengths,
    emit,
    play,
    predicted_acceptance,
    replay,
)
from drafttrain.evaluation.stops.trace import Trace
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from drafttrain.models.draft_states import ROW_FEATURES, StateKind


def random_head(width: int, seed: int = 0, state: StateKind = "token") -> AcceptanceHead:
    torch.manual_seed(seed)
    width += ROW_FEATURES if state == "drawn" else 0
    config = AcceptanceHeadConfig(hidden_size=width, depth=1, state=state)
    head = AcceptanceHead(config).double().eval()
    head.out.weight.data *= 3.0
    head.out.bias.data += 1.5
    return head


def replayed_rounds(trace: Trace, candidate: Candidate, head: AcceptanceHead | None = None):
    """(start, drafted, accepted) of every round of the first toss."""
    acceptance = {} if head is None else predicted_acceptance(trace, {"D": head})
    lengths = draft_lengths(trace, acceptance, [candidate])
    starts = np.flatnonzero(play(trace, lengths)[0, 0])
    _, accepted = emit(trace, lengths)
    return [(int(p), int(lengths[0, 0, p]), int(accepted[0, 0, p])) for p in starts]


def decoded_rounds(output: Output):
    start, rounds = 0, []
    for played in output.rounds:
        accepted = min(len(played.path), len(played.emitted))
        rounds.append((start, len(played.drafted), accepted))
        start += len(played.emitted)
    return rounds


def check_counts(
    trace: Trace, candidate: Candidate, head: AcceptanceHead, output: Output, ends=()
) -> None:
    """What costs go by is the same of a decoded output as of its replay."""
    replayed = replay(trace, predicted_acceptance(trace, {"D": head}), [candidate])
    drafting = Drafting(trace.block, trace.lag, frozenset(ends))
    decoded = count_chain(output, trace.before, trace.limit, candidate, drafting)
    both = PolicyCounts.stack([replayed, decoded])  # as long as the longer one
    for name, fact in vars(both).items():
        np.testing.assert_array_equal(fact[0], fact[1], err_msg=f"{name} of {candidate.name}")
