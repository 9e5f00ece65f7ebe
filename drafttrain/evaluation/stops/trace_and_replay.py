"""Prompts to counts: every prompt is decoded once, traced, and replayed under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drafttrain.config.progress import tracked
from drafttrain.decoding.drafters.slots import lengths_differ
from drafttrain.decoding.sampling import SampledRandomness, sequence_randomness
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.stops.block_trace import log_block_trace
from drafttrain.evaluation.stops.chain_trace import TraceOptions, decode_text, log_trace
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
        counts.append(_replay_prompt(bench, candidates, prompt, text, randomness))
    return PolicyCounts.stack(counts)


def _replay_prompt(
    bench: Workbench,
    candidates: Sequence[Candidate],
    prompt: Prompt,
    text: Sequence[int],
    randomness: SampledRandomness,
) -> PolicyCounts:
    """One output under every policy, on a trace for each rule. Where slots see those behind them
    (`lengths_differ`) also one for each number of slots: a fixed length is a block of
    that many, other policies cut blocks of max_draft."""
    drafter = bench.pair.drafter
    log = log_block_trace if bench.block else log_trace
    drafts = drafter if bench.block else drafter.model
    wanted = [_trace_options(bench, candidate) for candidate in candidates]
    parts, places = [], []
    for options in sorted(set(wanted), key=lambda one: (one.verifier != "rejection", one.depth)):
        places.append([i for i, own in enumerate(wanted) if own == options])
        trace = log(bench.target, drafts, prompt.source, text, options, randomness)
        chosen = [candidates[i] for i in places[-1]]
        heads = bench.heads if any(one.kind == "head" for one in chosen) else {}
        parts.append(replay(trace, predicted_acceptance(trace, heads), chosen))
    return PolicyCounts.beside(parts, places)


def _trace_options(bench: Workbench, candidate: Candidate) -> TraceOptions:
    """What the candidate's trace is logged with."""
    options = replace(bench.trace_options(), verifier=candidate.verifier)
    if not lengths_differ(bench.pair.drafter):
        return options
    fixed = candidate.kind == "fixed"
    return replace(options, depth=int(candidate.value) if fixed else bench.settings.max_draft)
