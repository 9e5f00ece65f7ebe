"""A report of acceptance along the target's own outputs; a few inputs are decoded for costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from datasets import Dataset

from drafttrain.build.method import Method
from drafttrain.config.kinds import KINDS
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.evaluation.bootstrap import Array, Estimate, draw_resamples, estimate_ratio
from drafttrain.evaluation.differences import compare_with_first
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.evaluate import options_facts
from drafttrain.evaluation.forced.along import Followed, follow_outputs, served_name
from drafttrain.evaluation.forced.rounds import Expected
from drafttrain.evaluation.jobs import PLAIN
from drafttrain.evaluation.metrics import (
    Counts,
    PositionCounts,
    acceptance_metrics,
    count_rounds,
    draft_time,
    mean_target_seconds,
    position_rates,
    walltime_improvement,
)
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt, PromptSet, read_prompts
from drafttrain.evaluation.report import (
    CallCosts,
    Report,
    Run,
    ServedRun,
    data_facts,
    target_facts,
)
from drafttrain.evaluation.runner import make_jobs, run_interleaved
from drafttrain.evaluation.served.measure import served_runs
from drafttrain.evaluation.summary import call_costs
from drafttrain.models.loading import LoadedTarget

MeasuredCosts = tuple[CallCosts | None, Estimate | None]
"""Of a method: what calls cost, and what a draft takes, in plain tokens."""


def evaluate_teacher_forced(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    rows: Dataset,
    options: EvaluationOptions,
    data_name: str,
    p_min: Sequence[float] = (),
    progress: bool = False,
    served: bool = True,
) -> Report:
    """What every method would accept along the target's own outputs; no speed, no texts.

    rows: with columns row, source and reference. served: whether engines' rules are followed too;
    p_min: of llama.cpp, to try beside 0. The report's first run is plain decoding. Raises
    ValueError where no row can be decoded, and as `make_jobs`.
    """
    prompts, skipped = read_prompts(target, model, rows)
    resamples = draw_resamples(len(prompts), options.bootstrap, options.seed)
    costs = measure_costs(target, model, methods, prompts, options, progress)
    followed = follow_outputs(model, methods, prompts, options, progress, served)
    plain = plain_counts(followed.lengths)
    counts = [expected_counts(*one) for one in zip(methods, followed.rounds, strict=True)]
    runs = [_plain_run(plain, resamples, options)]
    for place, method in enumerate(methods):
        run = _run(method, followed.rounds[place], counts[place], resamples, options)
        runs.append(_with_costs(run, method, counts[place], costs[place], resamples))
    return Report(
        mode="teacher-forced",
        target=target_facts(target),
        data=data_facts(PromptSet(data_name, prompts, skipped)),
        environment=describe_environment(),
        options=options_facts(options),
        runs=compare_with_first(runs, [None, *methods], [plain, *counts], resamples),
        served=_served(methods, followed, p_min, resamples),
    )


def measure_costs(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    progress: bool = False,
) -> list[MeasuredCosts]:
    """What drafting costs every method, from a few prompts decoded by all in turn.

    Raises ValueError, before anything is decoded, as `make_jobs`.
    """
    alone = replace(options, baselines=(), batch_sizes=(1,))
    timed = prompts[: options.timing_prompts]
    jobs = make_jobs(target, model, methods, timed, alone)
    if not timed:
        return [(None, None)] * len(methods)
    plain, *decoded = run_interleaved(jobs, len(timed), alone, model.device, progress)
    target_seconds = mean_target_seconds(plain.outputs)
    resamples = draw_resamples(len(timed), options.bootstrap, options.seed)
    found: list[MeasuredCosts] = []
    for run in decoded:
        counts = count_rounds(run.outputs)
        took = estimate_ratio(draft_time(counts, target_seconds), resamples)
        found.append((call_costs(run.method, counts, target_seconds), took))
    return found


def plain_counts(lengths: Array) -> Counts:
    """Plain decoding of the same outputs: one token a round."""
    nothing = np.zeros_like(lengths)
    return Counts(lengths, lengths, nothing, nothing, nothing)


def expected_counts(method: Method, rounds: Sequence[Expected]) -> Counts:
    """What decoding would count, in expectation. Drafts behind wrong tokens are as long as asked
    for: a language model that ends one by EOS there makes fewer calls."""
    kind = KINDS[method.drafter.name]
    drafted = np.array([one.num_draft_tokens for one in rounds], dtype=np.float64)
    accepted = np.array([one.num_accepted_tokens for one in rounds])
    steps = np.array([one.num_steps for one in rounds])
    passes, calls = np.zeros_like(steps), {}
    if kind.drafts == "tokens":
        passes = drafted
    elif kind.drafts == "blocks":
        passes = np.array([one.num_drafts for one in rounds])
    else:
        calls = {method.drafter.name: np.array([one.num_asked for one in rounds])}
    tokens = np.array([one.num_tokens for one in rounds], dtype=np.float64)
    return Counts(tokens, steps, drafted, accepted, passes, calls=calls)


def _plain_run(counts: Counts, resamples: Array, options: EvaluationOptions) -> Run:
    return Run(
        name=PLAIN,
        kind="plain",
        method=PLAIN,
        sizes={},
        drafter="none",
        stop=None,
        verifier="greedy" if options.sampling.greedy else "rejection",
        sampling=asdict(options.sampling),
        lossless=True,
        settings={},
        metrics=acceptance_metrics(counts, resamples),
        totals={"prompts": len(counts.tokens), **counts.totals()},
    )


def _run(
    method: Method,
    rounds: Sequence[Expected],
    counts: Counts,
    resamples: Array,
    options: EvaluationOptions,
) -> Run:
    by_position = PositionCounts(
        drafted=np.stack([one.num_drafted_per_pos for one in rounds]),
        accepted=np.stack([one.num_accepted_tokens_per_pos for one in rounds]),
        reached=np.stack([one.num_reached_per_pos for one in rounds]),
    )
    return Run(
        name=method.name,
        kind="method",
        method=method.kind,
        sizes=dict(method.sizes),
        drafter=method.drafter.name,
        other=method.other,
        parameters=method.parameters,
        stop=method.stop.name,
        verifier=method.verifier.name,
        sampling=asdict(options.sampling),
        lossless=method.verifier.lossless,
        settings=dict(method.settings),
        metrics=acceptance_metrics(counts, resamples, method.parameter_ratios),
        acceptance_rate_per_position=position_rates(by_position, resamples),
        totals={"prompts": len(rounds), **counts.totals()},
    )


def _with_costs(
    run: Run, method: Method, counts: Counts, measured: MeasuredCosts, resamples: Array
) -> Run:
    """The run with what its calls would cost, by what those of a few inputs took."""
    costs, took = measured
    if costs is None or took is None:
        return run
    expected = counts.calls or dict.fromkeys(method.parameter_ratios, counts.passes)
    calls = {name: round(float(own.sum())) for name, own in expected.items()}
    swi = estimate_ratio(walltime_improvement(counts, costs.measured), resamples)
    update = {
        "metrics": run.metrics | {"swi": swi, "draft_time": took},
        "costs": costs.model_copy(update={"calls": calls}),
    }
    return run.model_copy(update=update)


def _served(
    methods: Sequence[Method], followed: Followed, p_min: Sequence[float], resamples: Array
) -> list[ServedRun]:
    """What engines would accept of every language model's drafts, at each of its lengths."""
    lengths: dict[str, list[int]] = {}
    for method in methods:
        if served_name(method) in followed.judged:
            lengths.setdefault(served_name(method), []).append(method.stop.longest)
    return [
        run
        for name, own in lengths.items()
        for run in served_runs(name, followed.judged[name], own, p_min, resamples)
    ]
