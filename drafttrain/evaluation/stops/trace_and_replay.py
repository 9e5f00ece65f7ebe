"""Prompts to counts: every prompt is decoded once, traced, and replayed under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from drafttrain.config.progress import tracked
from drafttrain.decoding.sampling import SampledRandomness, sequence_randomness
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.stops.block_trace import log_block_trace
from drafttrain.evaluation.stops.chain_trace import decode_text, log_trace
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts, predicted_acceptance, replay
from drafttrain.evaluation.stops.workbench import Workbench


def replay_prompts(
    bench: Workbench, candidates: Sequence[Candidate], prompts: Sequence[Prompt], label: str
) -> PolicyCounts:
    """Counts of every prompt under every policy; random choices depend on seed and row alone."""
    counts, target, options = [], bench.target, bench.trace_options()
    for prompt in tracked(prompts, label, "input"):
        prompt = replace(prompt, source=target.read(prompt.source))
        randomness = sequence_randomness(bench.sampling.seed, prompt.row, target.device)
        text = decode_text(target, bench.pair.drafter, prompt.source, options, randomness)
        if bench.block:
            counts.append(_replay_blocks(bench, candidates, prompt, text, randomness))
            continue
        drafter = bench.pair.drafter.model
        trace = log_trace(target, drafter, prompt.source, text, options, randomness)
        counts.append(replay(trace, predicted_acceptance(trace, bench.heads), candidates))
    return PolicyCounts.stack(counts)


def _replay_blocks(
    bench: Workbench,
    candidates: Sequence[Candidate],
    prompt: Prompt,
    text: Sequence[int],
    randomness: SampledRandomness,
) -> PolicyCounts:
    """A fixed length is a block of that many slots; other policies cut blocks of max_draft."""
    longest = bench.settings.max_draft
    slots = [int(one.value) if one.kind == "fixed" else longest for one in candidates]
    facts = {name: np.zeros((1, len(slots))) for name in PolicyCounts.__dataclass_fields__}
    for depth in sorted(set(slots)):
        places = [i for i, number in enumerate(slots) if number == depth]
        options = replace(bench.trace_options(), depth=depth)
        drafter = bench.pair.drafter.model
        trace = log_block_trace(bench.target, drafter, prompt.source, text, options, randomness)
        chosen = [candidates[i] for i in places]
        heads = bench.heads if any(one.kind == "head" for one in chosen) else {}
        counts = replay(trace, predicted_acceptance(trace, heads), chosen)
        for name, fact in facts.items():
            fact[:, places] = getattr(counts, name)
    return PolicyCounts(**facts)
