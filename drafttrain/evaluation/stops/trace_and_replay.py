"""Prompts to counts: every prompt is decoded once, traced, and replayed under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from drafttrain.config.kinds import KINDS, with_states
from drafttrain.config.progress import tracked
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import SampledRandomness, sequence_randomness
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.stops.block_trace import log_block_trace
from drafttrain.evaluation.stops.chain_trace import TraceOptions, check_ends, decode_text, log_trace
from drafttrain.evaluation.stops.replay import (
    Candidate,
    PolicyCounts,
    predicted_acceptance,
    replay,
)
from drafttrain.models.acceptance_head import AcceptanceHead


@dataclass(frozen=True)
class Replaying:
    """A pair, its heads, and the policies to replay."""

    target: CachedModel
    drafter: Drafter
    heads: dict[str, AcceptanceHead]
    candidates: Sequence[Candidate]
    options: TraceOptions
    max_draft: int
    seed: int = 0


def replay_prompts(
    replaying: Replaying, prompts: Sequence[Prompt], label: str = "trace", progress: bool = False
) -> PolicyCounts:
    """Counts of every prompt under every policy; random choices depend on seed and row alone.

    Raises ValueError for a drafter that goes on after the target's EOS, or cannot be traced.
    """
    check_traceable(replaying.target, replaying.drafter)
    counts = []
    for prompt in tracked(prompts, label, "input", shown=progress):
        randomness = sequence_randomness(replaying.seed, prompt.row, replaying.target.device)
        text = decode_text(
            replaying.target, replaying.drafter, prompt.source, replaying.options, randomness
        )
        counts.append(_replay_one(replaying, prompt, text, randomness))
    return PolicyCounts.stack(counts)


def check_traceable(target: CachedModel, drafter: Drafter) -> None:
    """Raise ValueError, before anything is decoded, where no trace would be exact."""
    kind = KINDS.get(drafter.name)
    if kind is None or not kind.states:
        raise ValueError(f"drafter {drafter.name!r} cannot be traced; give {with_states()}")
    if kind.is_language_model:
        check_ends(target, drafter.model)


def _replay_one(
    replaying: Replaying, prompt: Prompt, text: Sequence[int], randomness: SampledRandomness
) -> PolicyCounts:
    options = replaying.options
    if KINDS[replaying.drafter.name].drafts == "tokens":
        trace = log_trace(
            replaying.target, replaying.drafter.model, prompt.source, text, options, randomness
        )
        return replay(trace, predicted_acceptance(trace, replaying.heads), replaying.candidates)
    return _replay_blocks(replaying, prompt, text, randomness)


def _replay_blocks(
    replaying: Replaying, prompt: Prompt, text: Sequence[int], randomness: SampledRandomness
) -> PolicyCounts:
    """A fixed length is a block of that many slots; other policies cut blocks of max_draft."""
    slots = [
        int(one.value) if one.kind == "fixed" else replaying.max_draft
        for one in replaying.candidates
    ]
    facts = {name: np.zeros((1, len(slots))) for name in PolicyCounts.__dataclass_fields__}
    for depth in sorted(set(slots)):
        places = [i for i, number in enumerate(slots) if number == depth]
        trace = log_block_trace(
            replaying.target,
            replaying.drafter.model,
            prompt.source,
            text,
            replace(replaying.options, depth=depth),
            randomness,
        )
        chosen = [replaying.candidates[i] for i in places]
        heads = replaying.heads if any(one.kind == "head" for one in chosen) else {}
        counts = replay(trace, predicted_acceptance(trace, heads), chosen)
        for name, fact in facts.items():
            fact[:, places] = getattr(counts, name)
    return PolicyCounts(**facts)
