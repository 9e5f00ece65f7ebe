"""Measure methods on inputs: by decoding, or by one parallel pass along known outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from drafttrain.build.method import Method
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Output, Source
from drafttrain.evaluation.batches.measure import batch_results, join_batches, measure_batches
from drafttrain.evaluation.batches.memory import memory_kind
from drafttrain.evaluation.bootstrap import Array, draw_resamples
from drafttrain.evaluation.engines.measure import decode_alone
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.jobs import PLAIN
from drafttrain.evaluation.metrics import (
    acceptance_metrics,
    count_positions,
    count_rounds,
    position_rates,
)
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.plots import plot_report
from drafttrain.evaluation.prompts import PromptSet, read_prompts
from drafttrain.evaluation.report import (
    DataFacts,
    Report,
    Run,
    data_facts,
    plot_path,
    samples_path,
    target_facts,
    write_json,
    write_samples,
)
from drafttrain.evaluation.runner import encoder_seconds, make_jobs, run_interleaved
from drafttrain.evaluation.summary import Context, make_samples, summarise_run
from drafttrain.evaluation.teacher_forced import PredictBlocks, plain_outputs, replay_outputs
from drafttrain.models.loading import LoadedTarget


@dataclass(frozen=True)
class Evaluation:
    """A report and the samples behind it."""

    report: Report
    samples: list[dict[str, Any]]
    """One for each prompt: texts, and draft tokens and accepted ones of every round. Empty where
    nothing was decoded."""


def write_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Write report.json, the samples, if there are any, and the plot."""
    write_json(evaluation.report, path)
    if evaluation.samples:
        write_samples(evaluation.samples, samples_path(path))
    plot_report(evaluation.report, plot_path(path))


def evaluate(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    rows: Dataset,
    options: EvaluationOptions,
    data_name: str,
    progress: bool = False,
) -> Evaluation:
    """Decode the rows with every method and the baselines, and report what each is worth.

    rows: with columns row, source and reference. The report's first run is plain decoding in the
    same engine. Raises ValueError where no row can be decoded.
    """
    prompts, skipped = read_prompts(target, model, rows)
    jobs = make_jobs(target, model, methods, prompts, options)
    engines = decode_alone(target, model, prompts, options, progress)
    decoded = run_interleaved(jobs, len(prompts), options, model.device, progress)
    batches = measure_batches(jobs, decoded, len(prompts), options, model.device, progress)
    decoded += [engine.decoded for engine in engines]
    batches = join_batches([batches, *[engine.batches for engine in engines]])
    texts = [
        [target.tokenizer.decode(o.tokens, skip_special_tokens=True) for o in run.outputs]
        for run in decoded
    ]
    resamples = draw_resamples(len(prompts), options.bootstrap, options.seed)
    encoding = encoder_seconds(model, prompts, options.repeats)
    context = Context(target, model, prompts, options, decoded, texts, resamples, encoding)
    report = Report(
        mode="decode",
        target=target_facts(target),
        data=data_facts(PromptSet(data_name, prompts, skipped)),
        environment=describe_environment(),
        options=options_facts(options),
        runs=[
            summarise_run(context, i).model_copy(
                update={"batches": batch_results(context, batches, run.name)}
            )
            for i, run in enumerate(decoded)
        ],
        compared_by=options.compared_by,
        memory=memory_kind(model.device) if batches else None,
    )
    return Evaluation(report, list(make_samples(context)))


def evaluate_teacher_forced(
    target: LoadedTarget,
    drafters: Sequence[tuple[str, int, PredictBlocks]],
    pairs: Sequence[tuple[Source, Sequence[int]]],
    options: EvaluationOptions,
    data_name: str,
) -> Report:
    """Acceptance of greedy verification from one parallel pass a sentence; no speed, no texts.

    drafters: (name, k, predict_blocks); pairs: (source that the target has read, its
    own output). Raises
    ValueError where there are no pairs.
    """
    resamples = draw_resamples(len(pairs), options.bootstrap, options.seed)
    runs = [_replayed_run("none", None, plain_outputs(pairs), resamples, options)]
    for name, k, predict_blocks in drafters:
        outputs = replay_outputs(predict_blocks, pairs, options.max_new_tokens)
        runs.append(_replayed_run(name, k, outputs, resamples, options))
    return Report(
        mode="teacher-forced",
        target=target_facts(target),
        data=DataFacts(path=data_name, prompts=len(pairs), references=0),
        environment=describe_environment(),
        options=options_facts(options),
        runs=runs,
    )


def options_facts(options: EvaluationOptions) -> dict[str, Any]:
    facts = asdict(options)
    del facts["sampling"], facts["compared_by"]  # the report has fields for them
    lists = {name: list(getattr(options, name)) for name in ("baselines", "batch_sizes")}
    return facts | lists


def _replayed_run(
    drafter: str,
    k: int | None,
    outputs: Sequence[Output],
    resamples: Array,
    options: EvaluationOptions,
) -> Run:
    """k: tokens of a block; None for plain decoding."""
    counts = count_rounds(outputs)
    return Run(
        name=PLAIN if k is None else f"{drafter} k={k} greedy",
        kind="plain" if k is None else "method",
        method=PLAIN if k is None else "chain",
        sizes={} if k is None else {"depth": k, "nodes": k, "k": k},
        drafter=drafter,
        stop=None if k is None else f"k={k}",
        verifier="greedy",
        sampling=asdict(options.sampling),
        lossless=True,
        settings={} if k is None else {"k": k},
        metrics=acceptance_metrics(counts, resamples),
        acceptance_rate_per_position=position_rates(count_positions(outputs), resamples),
        totals={"prompts": len(outputs), **counts.totals()},
    )
