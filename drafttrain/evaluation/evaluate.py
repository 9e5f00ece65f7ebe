"""Measure methods on inputs by decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from drafttrain.build.method import Method
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.evaluation.batches.measure import batch_results, measure_batches
from drafttrain.evaluation.batches.memory import memory_kind
from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.differences import compare_with_first
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.metrics import count_rounds
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.plots import plot_report
from drafttrain.evaluation.prompts import PromptSet, read_prompts
from drafttrain.evaluation.report import (
    Report,
    data_facts,
    plot_path,
    samples_path,
    target_facts,
    write_json,
    write_samples,
)
from drafttrain.evaluation.runner import encoder_seconds, make_jobs, run_interleaved
from drafttrain.evaluation.summary import Context, make_samples, summarise_run
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
    decoded = run_interleaved(jobs, len(prompts), options, model.device, progress)
    batches = measure_batches(jobs, decoded, len(prompts), options, model.device, progress)
    texts = [
        [target.tokenizer.decode(o.tokens, skip_special_tokens=True) for o in run.outputs]
        for run in decoded
    ]
    resamples = draw_resamples(len(prompts), options.bootstrap, options.seed)
    encoding = encoder_seconds(model, prompts, options.repeats)
    context = Context(target, model, prompts, options, decoded, texts, resamples, encoding)
    runs = [
        summarise_run(context, i).model_copy(
            update={"batches": batch_results(context, batches, run.name)}
        )
        for i, run in enumerate(decoded)
    ]
    report = Report(
        mode="decode",
        target=target_facts(target),
        data=data_facts(PromptSet(data_name, prompts, skipped)),
        environment=describe_environment(),
        options=options_facts(options),
        runs=compare_with_first(
            runs,
            [run.method for run in decoded],
            [count_rounds(run.outputs) for run in decoded],
            resamples,
        ),
        compared_by=options.compared_by,
        memory=memory_kind(model.device) if batches else None,
    )
    return Evaluation(report, list(make_samples(context)))


def options_facts(options: EvaluationOptions) -> dict[str, Any]:
    facts = asdict(options)
    del facts["sampling"], facts["compared_by"]  # the report has fields for them
    lists = {name: list(getattr(options, name)) for name in ("baselines", "batch_sizes")}
    return facts | lists
