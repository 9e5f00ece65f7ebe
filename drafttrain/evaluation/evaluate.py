"""Measures methods on inputs: decoded and interleaved, or teacher-forced along plain outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from drafttrain.build.method import Method
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.evaluation.bootstrap import draw_resamples, estimate_ratio
from drafttrain.evaluation.environment import describe_environment, memory_kind, peak_growth
from drafttrain.evaluation.metrics import (
    Counts,
    acceptance_metrics,
    count_rounds,
    identical,
    position_rates,
)
from drafttrain.evaluation.page import render_page
from drafttrain.evaluation.plots import plot_report
from drafttrain.evaluation.prompts import (
    EvaluationOptions,
    Job,
    Prompt,
    PromptSet,
    Skipped,
    read_prompts,
)
from drafttrain.evaluation.quality import compare_outputs
from drafttrain.evaluation.report import (
    BatchResult,
    Report,
    Run,
    data_facts,
    plot_path,
    samples_path,
    target_facts,
    write_json,
    write_samples,
    write_text,
)
from drafttrain.evaluation.runner import (
    Decoded,
    encoder_seconds,
    make_jobs,
    make_waves,
    run_interleaved,
)
from drafttrain.evaluation.summary import (
    Context,
    compare_with_first,
    make_samples,
    method_facts,
    speed_metrics,
    summarise_run,
)
from drafttrain.evaluation.tables import report_page
from drafttrain.evaluation.teacher_forced import measure_forced
from drafttrain.evaluation.tune_report import tune_page
from drafttrain.models.loading import LoadedTarget


@dataclass(frozen=True)
class Evaluation:
    """A report and the samples behind it."""

    report: Report
    samples: list[dict[str, Any]]
    """One for each prompt: texts, and draft tokens and accepted ones of every round. Empty where
    nothing was decoded."""


def write_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Write report.json, its plot and page, and the samples, if there are any."""
    report, plot = evaluation.report, plot_path(path)
    write_json(report, path)
    if evaluation.samples:
        write_samples(evaluation.samples, samples_path(path))
    plot_report(report, plot)
    make = report_page if report.search is None else tune_page
    write_text(path.with_suffix(".html"), render_page(make(report, plot.read_bytes())))


def evaluate(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    rows: Dataset,
    options: EvaluationOptions,
    data_name: str,
    progress: bool = False,
) -> Evaluation:
    """Decode the rows with every method and the baselines, and report the figures of each.

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
        summarise_run(context, place).model_copy(
            update={"batches": batch_results(context, batches, run.name)}
        )
        for place, run in enumerate(decoded)
    ]
    counts = [count_rounds(run.outputs) for run in decoded]
    report = Report(
        **_report_facts(target, data_name, prompts, skipped, options),
        mode="decode",
        runs=compare_with_first(runs, [run.method for run in decoded], counts, resamples),
        memory=memory_kind(model.device) if batches else None,
    )
    return Evaluation(report, list(make_samples(context)))


def evaluate_teacher_forced(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    rows: Dataset,
    options: EvaluationOptions,
    data_name: str,
    progress: bool = False,
) -> Evaluation:
    """Report what every method would accept along the target's plain outputs (`teacher_forced.py`).

    Raises ValueError as `evaluate`.
    """
    prompts, skipped = read_prompts(target, model, rows)
    make_jobs(target, model, methods, prompts, replace(options, baselines=()))  # checks the methods
    plain, forced = measure_forced(model, methods, prompts, options, progress)
    resamples = draw_resamples(len(prompts), options.bootstrap, options.seed)

    def run(method: Method | None, counts: Counts, **found: Any) -> Run:
        ratios = None if method is None else method.parameter_ratios
        metrics = acceptance_metrics(counts, resamples, ratios) | found.pop("metrics", {})
        totals = {"prompts": len(prompts), **counts.totals()}
        return Run(**method_facts(method, options), metrics=metrics, totals=totals, **found)

    runs = [run(None, plain)]
    for method, one in zip(methods, forced, strict=True):
        overlaps = {name: estimate_ratio(own, resamples) for name, own in one.overlaps.items()}
        runs.append(
            run(
                method,
                one.counts,
                metrics={name: found for name, found in overlaps.items() if found is not None},
                acceptance_rate_per_position=position_rates(one.positions, resamples),
            )
        )
    counts = [plain, *(one.counts for one in forced)]
    report = Report(
        **_report_facts(target, data_name, prompts, skipped, options),
        mode="teacher-forced",
        runs=compare_with_first(runs, [None, *methods], counts, resamples),
    )
    return Evaluation(report, [])


def _report_facts(
    target: LoadedTarget,
    data_name: str,
    prompts: list[Prompt],
    skipped: list[Skipped],
    options: EvaluationOptions,
) -> dict[str, Any]:
    facts = asdict(options)
    del facts["sampling"]  # every run has it
    lists = {name: list(getattr(options, name)) for name in ("baselines", "batch_sizes")}
    return {
        "target": target_facts(target),
        "data": data_facts(PromptSet(data_name, prompts, skipped)),
        "environment": describe_environment(),
        "options": facts | lists,
    }


@dataclass(frozen=True)
class Batch:
    """The jobs at one batch size."""

    decoded: list[Decoded]
    memory: Mapping[str, int]
    """Peak bytes of a wave, by the job's name."""


def measure_batches(
    jobs: Sequence[Job],
    alone: Sequence[Decoded],
    prompts: int,
    options: EvaluationOptions,
    device: torch.device,
    progress: bool = False,
) -> dict[int, Batch]:
    """The jobs at every batch size; nothing where 1 is the only one.

    alone: the jobs at batch size 1. At each batch size the jobs that take it are interleaved wave
    by wave; afterwards each decodes one more wave for its memory.
    """
    if len(options.batch_sizes) < 2:
        return {}
    found = {}
    for size in options.batch_sizes:
        able = [job for job in jobs if job.takes(size)]
        if size == 1:
            decoded = list(alone)
        else:
            decoded = run_interleaved(able, prompts, options, device, progress, size)
        [wave, *_] = make_waves(prompts, size)
        memory = {
            job.name: peak_growth(
                lambda job=job, wave=wave, size=size: job.decode(wave, size), device
            )
            for job in able
        }
        found[size] = Batch(decoded, memory)
    return found


def batch_results(context: Context, batches: Mapping[int, Batch], name: str) -> list[BatchResult]:
    """A run at every batch size that it was measured at, in rising order."""
    alone = next(run for run in context.decoded if run.name == name)
    greedy, limit = context.options.sampling.greedy, context.options.max_new_tokens
    found = []
    for size, batch in sorted(batches.items()):
        run = next((run for run in batch.decoded if run.name == name), None)
        if run is None:
            continue
        differing = len(run.outputs) - int(identical(run.outputs, alone.outputs).sum())
        parity = None
        if size > 1 and greedy and run.method is not None and run.lossless:
            pair = run.outputs, alone.outputs
            parity = compare_outputs(context.model, context.prompts, *pair, limit, "batch size 1")
        found.append(
            BatchResult(
                batch_size=size,
                metrics=speed_metrics(replace(context, decoded=batch.decoded), run),
                differing=differing if run.method is not None or greedy else None,
                parity=parity,
                memory_bytes=batch.memory[name],
            )
        )
    return found
