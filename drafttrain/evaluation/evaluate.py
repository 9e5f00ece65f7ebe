"""Measures methods on inputs: decoded and interleaved, or teacher-forced along plain outputs.

Both ways give figures, statistics over prompts by name, all estimated with the same resamples.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset

from drafttrain.build.method import Method
from drafttrain.decoding.engine.cache import release_caches
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Round
from drafttrain.evaluation import metrics, quality
from drafttrain.evaluation.bootstrap import (
    Array,
    Ratio,
    Statistic,
    draw_resamples,
    estimate_all,
    mean,
)
from drafttrain.evaluation.page import render_page
from drafttrain.evaluation.plots import plot_report
from drafttrain.evaluation.prompts import (
    GENERATE,
    PLAIN,
    EvaluationOptions,
    Prompt,
    read_prompts,
)
from drafttrain.evaluation.report import (
    Parity,
    Report,
    Run,
    data_facts,
    describe_environment,
    target_facts,
    write_json,
    write_text,
)
from drafttrain.evaluation.runner import (
    Decoded,
    Job,
    make_jobs,
    make_waves,
    plain_method,
    run_interleaved,
)
from drafttrain.evaluation.tables import report_page
from drafttrain.evaluation.teacher_forced import ForcedCounts, measure_forced
from drafttrain.models.loading import LoadedTarget


@dataclass(frozen=True)
class Evaluation:
    """A report and the samples behind it."""

    report: Report
    samples: list[dict[str, Any]]
    """One for each prompt: texts, and draft tokens and accepted ones of every round. Empty where
    nothing was decoded."""


def write_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Write report.json, its plot and page, and the samples, if there are any: samples.jsonl beside
    report.json, NAME.samples.jsonl beside NAME.json."""
    report, plot = evaluation.report, path.with_suffix(".png")
    write_json(report, path)
    if evaluation.samples:
        name = "samples.jsonl" if path.stem == "report" else f"{path.stem}.samples.jsonl"
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in evaluation.samples]
        write_text(path.with_name(name), "".join(lines))
    plot_report(report, plot)
    write_text(path.with_suffix(".html"), render_page(report_page(report, plot.read_bytes())))


@dataclass(frozen=True)
class Measured:
    """What a run is made from."""

    facts: dict[str, Any]
    """Fields of `Run`, but for its metrics."""
    figures: dict[str, Statistic]


@dataclass(frozen=True)
class Context:
    """All that was decoded, which every run is compared with."""

    model: CachedModel
    prompts: Sequence[Prompt]
    options: EvaluationOptions
    decoded: Sequence[Decoded]
    """By batch size, 1 first; of each plain decoding first."""
    texts: Mapping[str, Sequence[str]]
    """[P] decoded texts at batch size 1, by the job's name."""


def evaluate(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    rows: Dataset,
    options: EvaluationOptions,
    data_name: str,
    progress: bool = False,
    mode: Literal["decode", "teacher-forced"] = "decode",
) -> Evaluation:
    """Decode the rows with every method and the baselines, and report the figures of each;
    teacher-forced: what each method would accept along the target's plain outputs.

    rows: with columns row, source and reference. The report's first run is plain decoding in the
    same engine. Raises ValueError where no row can be decoded, or methods do not fit (`make_jobs`).
    """
    prompts, skipped = read_prompts(target, model, rows)
    resamples, samples = draw_resamples(len(prompts), options.bootstrap, options.seed), []
    if mode == "teacher-forced":
        options = replace(options, baselines=())
    jobs = make_jobs(target, model, methods, prompts, options)
    if mode == "teacher-forced":
        forced = measure_forced(model, methods, prompts, options, progress)
        pairs = zip((plain_method(options.sampling), *methods), forced, strict=True)
        measured = [measure_along(method, one, options, resamples) for method, one in pairs]
    else:
        context = decode_all(target, model, jobs, prompts, options, progress)
        measured = [measure(context, run, resamples) for run in context.decoded]
        samples = make_samples(context, target.tokenizer.convert_ids_to_tokens)
    given = asdict(options) | {"baselines": list(options.baselines)}
    given["batch_sizes"] = list(options.batch_sizes)
    del given["sampling"]  # every run has it
    report = Report(
        mode=mode,
        target=target_facts(target),
        data=data_facts(data_name, prompts, skipped),
        environment=describe_environment(),
        options=given,
        runs=[Run(**one.facts, metrics=estimate_all(one.figures, resamples)) for one in measured],
    )
    return Evaluation(report, samples)


def decode_all(
    target: LoadedTarget,
    model: CachedModel,
    jobs: Sequence[Job],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    progress: bool,
) -> Context:
    """Everything decoded, and the texts of batch size 1."""
    decoded = decode_batches(jobs, len(prompts), options, model.device, progress)
    decode = target.tokenizer.decode
    texts = {
        run.job.name: [decode(output.tokens, skip_special_tokens=True) for output in run.outputs]
        for run in decoded
        if run.batch_size == 1
    }
    return Context(model, prompts, options, decoded, texts)


def decode_batches(
    jobs: Sequence[Job],
    prompts: int,
    options: EvaluationOptions,
    device: torch.device,
    progress: bool = False,
) -> list[Decoded]:
    """The jobs at every batch size that they take, interleaved wave by wave; where there are
    several sizes, each job decodes one more wave for its memory."""
    found = []
    for size in options.batch_sizes:
        able = [job for job in jobs if job.takes(size)]
        decoded = run_interleaved(able, prompts, options, device, progress, size)
        if len(options.batch_sizes) > 1:
            [wave, *_] = make_waves(prompts, size)
            for place, run in enumerate(decoded):
                memory = peak_growth(partial(run.job.decode, wave, size), device)
                decoded[place] = replace(run, memory_bytes=memory)
        found += decoded
    return found


def peak_growth(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that torch has allocated on a CUDA device at the worst moment of some work, beyond
    those before it; the engine's own caches are emptied first. None on another device, where work
    is not done at all."""
    if device.type != "cuda":
        return None
    gc.collect()
    release_caches()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def measure(context: Context, run: Decoded, resamples: Array) -> Measured:
    """All figures of one run; above batch size 1 its speed, parity and memory."""
    job, method, options = run.job, run.job.method, context.options
    plain, sampled = context.decoded[0], not options.sampling.greedy
    if method is None:
        facts: dict[str, Any] = {"name": job.name, "kind": job.kind, "method": job.way}
        facts |= {"sizes": dict(job.sizes), "sampling": asdict(options.sampling)}
        facts |= {"lossless": job.lossless}
    else:
        facts = method_facts(method, options)
    counts = metrics.count_rounds(run.outputs)
    totals = {"tokens": sum(len(output.tokens) for output in run.outputs)}
    facts |= {"totals": {"prompts": len(run.outputs), **(counts.totals() if method else totals)}}
    facts |= {"batch_size": run.batch_size, "memory_bytes": run.memory_bytes}
    facts["parity"] = check_parity(context, run)
    peers = [other for other in context.decoded if other.batch_size == run.batch_size]
    figures = metrics.speed_figures(run, peers, sampled)
    if run.batch_size > 1:
        if method is not None or not sampled:
            same = metrics.identical(run.outputs, alone(context, run).outputs)
            facts["differing"] = int(len(same) - same.sum())
        return Measured(facts, figures)
    if method is not None:
        positions = metrics.count_positions(run.outputs)
        facts["acceptance_rate_per_position"] = metrics.position_rates(positions, resamples)
        facts["time"] = metrics.time_shares(run.outputs)
        figures |= metrics.acceptance_figures(counts, method.parameter_ratios)
        if method.parameter_ratios:
            rounds = [one for output in plain.outputs for one in output.rounds]
            seconds = sum(one.target_seconds for one in rounds) / len(rounds)
            facts["costs"] = metrics.CallCosts.of(counts, method.parameter_ratios, seconds)
            figures["swi"] = metrics.walltime_improvement(counts, facts["costs"].measured)
    return Measured(facts, figures | output_figures(context, run))


def output_figures(context: Context, run: Decoded) -> dict[str, Statistic]:
    """How good the outputs are and how near those of plain decoding; of clips also how fast."""
    plain, prompts = context.decoded[0], context.prompts
    greedy, seconds = context.options.sampling.greedy, [prompt.seconds for prompt in prompts]
    texts, references = context.texts[run.job.name], [prompt.reference for prompt in prompts]
    others = None if run is plain else context.texts[PLAIN]
    figures: dict[str, Statistic] = {}
    if greedy and run is not plain:
        figures["identical"] = mean(metrics.identical(run.outputs, plain.outputs))
    if None not in seconds:  # clips
        figures["rtf"] = Ratio(run.cost_seconds, np.array(seconds))
        return figures | quality.word_error_figures(texts, references, others)
    overlap = not any(prompt.chat for prompt in prompts)
    tokenizer = context.options.bleu_tokenizer
    return figures | quality.text_figures(texts, references, others, tokenizer, overlap, greedy)


def measure_along(
    method: Method, found: ForcedCounts, options: EvaluationOptions, resamples: Array
) -> Measured:
    """All figures of a teacher-forced run."""
    facts, ratios = method_facts(method, options), method.parameter_ratios
    facts["totals"] = {"prompts": len(found.counts.tokens), **found.counts.totals()}
    facts["acceptance_rate_per_position"] = metrics.position_rates(found.positions, resamples)
    return Measured(facts, metrics.acceptance_figures(found.counts, ratios) | found.overlaps)


def method_facts(method: Method, options: EvaluationOptions) -> dict[str, Any]:
    """The fields of a run that its method decides."""
    plain = method.kind == PLAIN
    return {
        "name": method.name,
        "kind": "plain" if plain else "method",
        "method": method.kind,
        "batch_size": 1,
        "sizes": dict(method.sizes),
        "drafter": method.drafter.name,
        "other": method.other,
        "parameters": method.parameters,
        "stop": None if plain else method.stop.name,
        "verifier": method.verifier.name,
        "sampling": asdict(options.sampling),
        "lossless": method.verifier.lossless,
        "settings": dict(method.settings),
    }


def check_parity(context: Context, run: Decoded) -> list[Parity]:
    """Compare lossless greedy outputs, token for token, with plain decoding and with `generate`;
    above batch size 1 with those of batch size 1."""
    options, job = context.options, run.job
    if not (options.sampling.greedy and job.lossless) or job.kind == "baseline":
        return []
    others = {"batch size 1": alone(context, run)}
    if run.batch_size == 1:
        found = [one for one in context.decoded if one.batch_size == 1 and one is not run]
        others = {one.job.name: one for one in found if one.job.way in (PLAIN, GENERATE)}
    pair, limit = (context.model, context.prompts, run.outputs), options.max_new_tokens
    return [
        quality.compare_outputs(*pair, one.outputs, limit, name) for name, one in others.items()
    ]


def alone(context: Context, run: Decoded) -> Decoded:
    """The same job at batch size 1."""
    return next(other for other in context.decoded if other.job is run.job)


def make_samples(
    context: Context, pieces: Callable[[list[int]], list[str]]
) -> list[dict[str, Any]]:
    """One line for each prompt: every run's text, and its rounds as pieces of text."""
    found = []
    for place, prompt in enumerate(context.prompts):
        outputs = {}
        for run in context.decoded[1:]:
            if run.batch_size > 1:
                continue
            outputs[run.job.name] = {"text": context.texts[run.job.name][place]}
            if run.job.method is not None:
                rounds = [round_pieces(one, pieces) for one in run.outputs[place].rounds]
                outputs[run.job.name]["rounds"] = rounds
        found.append(
            {
                "row": prompt.row,
                "temperature": context.options.sampling.temperature,
                "source": prompt.text,
                "reference": prompt.reference,
                "plain": context.texts[PLAIN][place],
                "outputs": outputs,
            }
        )
    return found


def round_pieces(
    played: Round, pieces: Callable[[list[int]], list[str]]
) -> dict[str, int | list[int] | list[str]]:
    """A round as samples have it; of a tree also which of the drafted tokens were accepted."""
    accepted = metrics.accepted_tokens(played)
    path = {} if played.depth is None else {"path": list(played.path[:accepted])}
    drafted, emitted = pieces(list(played.drafted)), pieces(list(played.emitted))
    return {"drafted": drafted, "accepted": accepted, **path, "emitted": emitted}
