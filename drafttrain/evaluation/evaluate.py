"""Measures methods on inputs, by interleaved decoding or teacher-forced on plain outputs.

Both modes compute statistics over prompts, which are all estimated with the same resamples.
"""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from drafttrain.build.method import Method
from drafttrain.build.pairs import Pair
from drafttrain.config.base import Interrupted, counted
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.data.shards.writing import say, write_file
from drafttrain.decoding.engine.cache import release_caches
from drafttrain.decoding.engine.engine import reserve
from drafttrain.decoding.types import Sampling
from drafttrain.evaluation import bootstrap, metrics, quality
from drafttrain.evaluation.bootstrap import Array, Ratio, Statistic, draw_resamples, estimate_all
from drafttrain.evaluation.page import render_page
from drafttrain.evaluation.plan import check_batches
from drafttrain.evaluation.plots import plot_report
from drafttrain.evaluation.prompts import Prompt, is_cut, read_prompts
from drafttrain.evaluation.report import (
    DataFacts,
    Parity,
    Report,
    Run,
    TargetFacts,
    describe_environment,
    read_report,
)
from drafttrain.evaluation.runner import (
    ASSISTED,
    GENERATE,
    PLAIN,
    Decoded,
    DecodingInterrupted,
    Job,
    make_groups,
    make_jobs,
    run_interleaved,
)
from drafttrain.evaluation.teacher_forced import ForcedCounts, measure_forced

OPTIONS = {"compile", "baselines", "batch_sizes", "repeats", "warmup", "bleu_tokenizer"}
"""Settings that a report records in addition to sampling, methods and data."""


@dataclass(frozen=True)
class Evaluation:
    """A report and its decoded samples."""

    report: Report
    samples: list[dict[str, Any]]
    """One per prompt: texts, and the draft and accepted tokens of every round. Empty in
    teacher-forced mode."""


def write_evaluation(evaluation: Evaluation, path: Path) -> Path:
    """Writes the report at `path`, its plot and page, and any samples: samples.jsonl next to
    report.json, NAME.samples.jsonl next to NAME.json.

    Returns the file written: if `path` holds a report of more inputs or methods, a partial report
    or one of `eval` does not replace it but goes to NAME.smaller.json, and so on. Raises
    Interrupted after writing a partial report.
    """
    report = evaluation.report
    if (report.search is None or report.partial) and path.exists():
        inputs, methods = read_report(path).size
        if inputs > report.size[0] or methods > report.size[1]:
            shown = f"{counted(inputs, 'input')} and {counted(methods, 'method')}"
            say(f"{path} holds more ({shown}) and stays as it is")
            return write_evaluation(evaluation, path.with_suffix(".smaller.json"))
    plot = plot_report(report)
    write_file(path, report.model_dump_json(indent=2) + "\n")
    name = "samples.jsonl" if path.stem == "report" else f"{path.stem}.samples.jsonl"
    path.with_name(name).unlink(missing_ok=True)  # those of an earlier report
    if lines := [json.dumps(line, ensure_ascii=False) + "\n" for line in evaluation.samples]:
        write_file(path.with_name(name), "".join(lines))
    write_file(path.with_suffix(".png"), plot)
    write_file(path.with_suffix(".html"), render_page(report, plot))
    if report.partial:
        raise Interrupted(f"interrupted after {report.partial}; {path} holds them")
    return path


@dataclass(frozen=True)
class Context:
    """All decoded runs, with the models and prompts, for comparisons between runs."""

    pair: Pair
    prompts: Sequence[Prompt]
    settings: EvalConfig
    decoded: Sequence[Decoded]
    """Ordered by batch size, 1 first; plain decoding is the first run of each size."""
    texts: Mapping[str, Sequence[str]]
    """[P] output texts at batch size 1, by job name."""

    def alone(self, run: Decoded) -> Decoded:
        """Returns the run of the same job at batch size 1."""
        return next(other for other in self.decoded if other.job is run.job)


def evaluate(
    pair: Pair,
    methods: Sequence[Method],
    rows: Dataset,
    settings: EvalConfig,
    progress: bool = False,
) -> Evaluation:
    """Decodes the rows with plain decoding, every method and the baselines, and measures each; in
    teacher-forced mode counts what each method would accept on the plain outputs.

    The report's first run is plain decoding in the same engine. After Ctrl-C the report is
    `partial` and covers what was decoded until then. Raises ValueError if no row can be decoded, or
    as `make_jobs` does.
    """
    if settings.mode == "teacher-forced":
        settings = settings.model_copy(update={"baselines": ()})
    jobs = make_jobs(pair, methods, settings)
    prompts, skipped = read_prompts(pair, rows)
    check_batches(settings.batch_sizes, len(prompts))
    sampling, samples, model = settings.decode.sampling, [], pair.target.model
    new, planned = sampling.max_new_tokens, len(prompts)
    reserve(max(len(one.source.prefix) for one in prompts) + new)
    sizes, repeats = len(settings.batch_sizes), settings.repeats
    if settings.mode == "teacher-forced":
        drafting = [job.method for job in jobs[1:]]
        forced = measure_forced(pair.model, drafting, prompts, sampling, progress)
        cut, prompts = forced[0].cut, prompts[: len(forced[0].counts.tokens)]
        resamples = draw_resamples(len(prompts), seed=sampling.seed)
        runs = [
            measure_teacher_forced(job, counts, sampling, resamples)
            for job, counts in zip(jobs, forced, strict=True)
        ]
    else:
        try:
            decoded = decode_batches(jobs, prompts, settings, pair.model.device, progress)
        except DecodingInterrupted as interruption:
            decoded = interruption.decoded
        repeats, done = decoded[0].seconds.shape
        prompts, sizes = prompts[:done], len({run.batch_size for run in decoded})
        resamples = draw_resamples(len(prompts), seed=sampling.seed)
        texts, detokenize = {}, pair.target.tokenizer.batch_decode
        for run in decoded[: len(jobs)]:  # of batch size 1
            tokens = [output.tokens for output in run.outputs]
            texts[run.job.name] = detokenize(tokens, skip_special_tokens=True)
        cut = sum(is_cut(pair.model, output.tokens, new) for output in decoded[0].outputs)
        context = Context(pair, prompts, settings, decoded, texts)
        runs = [measure(context, run, resamples) for run in decoded]
        samples = make_samples(context)
    finished = {"inputs": (len(prompts), planned), "repeats": (repeats, settings.repeats)}
    finished["batch sizes"] = (sizes, len(settings.batch_sizes))
    part = ", ".join(f"{n} of {all_} {of}" for of, (n, all_) in finished.items() if n < all_)
    data = DataFacts.of(settings.data, rows, prompts, skipped)
    report = Report(
        mode=settings.mode,
        target=TargetFacts(
            path=pair.target.path,
            parameters=model.num_parameters(),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
        ),
        data=data.model_copy(update={"cut_by_positions": cut}),
        environment=describe_environment(),
        options=settings.model_dump(mode="json", include=OPTIONS)
        | sampling.model_dump(include={"seed", "max_new_tokens"}),
        runs=runs,
        partial=part or None,
    )
    return Evaluation(report, samples)


def decode_batches(
    jobs: Sequence[Job],
    prompts: Sequence[Prompt],
    settings: EvalConfig,
    device: torch.device,
    progress: bool = False,
) -> list[Decoded]:
    """Runs the jobs at every batch size, interleaved group by group; assisted generation only at
    batch size 1. With several sizes each job decodes one more group to measure its memory."""
    results = []
    for size in settings.batch_sizes:
        supported = [job for job in jobs if size == 1 or job.way != ASSISTED]
        try:
            decoded = run_interleaved(supported, prompts, settings, device, progress, size)
        except DecodingInterrupted as interruption:
            raise DecodingInterrupted(results or interruption.decoded) from None
        if len(settings.batch_sizes) > 1 and device.type == "cuda":
            group = [prompts[index] for index in make_groups(len(prompts), size)[0]]
            for index, run in enumerate(decoded):
                memory = peak_growth(partial(run.job.decode, group, size), device)
                decoded[index] = replace(run, memory_bytes=memory)
        results += decoded
    return results


def peak_growth(work: Callable[[], object], device: torch.device) -> int:
    """Runs `work` and returns the peak growth in bytes of torch's memory on a CUDA device; the
    engine's caches are released first."""
    gc.collect()
    release_caches()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def measure(context: Context, run: Decoded, resamples: Array) -> Run:
    """Computes all metrics of one run; above batch size 1 only speed, parity and memory."""
    method, sampling, outputs = run.job.method, context.settings.decode.sampling, run.outputs
    sampled, facts = sampling.temperature > 0.0, job_facts(run.job, sampling)
    counts = metrics.count_rounds(outputs)
    totals = counts.totals() if method else {"tokens": int(run.token_counts.sum())}
    if too_long := sum(output.rounds[0].too_long for output in outputs if output.rounds):
        totals["too_long"] = too_long
    facts |= {"totals": {"prompts": len(outputs), **totals}, "parity": check_parity(context, run)}
    facts |= {"batch_size": run.batch_size, "memory_bytes": run.memory_bytes}
    peers = [other for other in context.decoded if other.batch_size == run.batch_size]
    figures = metrics.speed_figures(run, peers, sampled)
    if run.batch_size > 1:
        if method is not None or not sampled:
            same = metrics.identical(outputs, context.alone(run).outputs)
            figures["identical"] = bootstrap.mean(same)
        return Run(**facts, metrics=estimate_all(figures, resamples))
    if method is not None:
        positions = metrics.count_positions(outputs)
        facts["acceptance_rate_per_position"] = metrics.position_rates(positions, resamples)
        facts["time"] = counts.time_shares(sum(output.seconds for output in outputs))
        figures |= metrics.acceptance_figures(counts, method.parameter_ratios)
        if method.parameter_ratios:
            _, seconds = metrics.call_seconds(context.decoded[0].outputs)
            facts["costs"] = metrics.CallCosts.of(counts, method.parameter_ratios, seconds)
            figures["swi"] = metrics.walltime_improvement(counts, facts["costs"].measured)
    return Run(**facts, metrics=estimate_all(figures | output_figures(context, run), resamples))


def measure_teacher_forced(
    job: Job, forced: ForcedCounts, sampling: SamplingConfig, resamples: Array
) -> Run:
    """Computes all metrics of a teacher-forced run."""
    facts = job_facts(job, sampling)
    facts["totals"] = {"prompts": len(forced.counts.tokens), **forced.counts.totals()}
    facts["acceptance_rate_per_position"] = metrics.position_rates(forced.positions, resamples)
    figures = metrics.acceptance_figures(forced.counts, job.method.parameter_ratios)
    return Run(**facts, metrics=estimate_all(figures | forced.overlaps, resamples))


def job_facts(job: Job, sampling: SamplingConfig) -> dict[str, Any]:
    """Returns the fields of a run that are known before decoding."""
    facts = {"name": job.name, "kind": job.kind, "method": job.way}
    facts |= {"lossless": job.lossless, "sampling": asdict(Sampling.of(sampling))}
    if (method := job.method) is not None:
        facts |= {"drafter": method.drafter.name, "verifier": method.verifier.name}
        facts |= {"stop": None if job.kind == "plain" else method.stop.name}
        facts |= {"other": method.other, "called": method.called, "parameters": method.parameters}
        facts |= {"settings": dict(method.settings), "sizes": dict(method.sizes)}
    return facts


def output_figures(context: Context, run: Decoded) -> dict[str, Statistic]:
    """Returns the quality of the outputs and their agreement with plain decoding; for audio clips
    also the real-time factor."""
    plain, prompts = context.decoded[0], context.prompts
    greedy = context.settings.decode.sampling.temperature == 0.0
    references, seconds = [one.reference for one in prompts], [one.seconds for one in prompts]
    expected = None if run is plain else context.texts[PLAIN]
    compared = context.texts[run.job.name], references, expected
    figures: dict[str, Statistic] = {}
    if run is not plain and greedy:
        figures["identical"] = bootstrap.mean(metrics.identical(run.outputs, plain.outputs))
    if None not in seconds:  # clips
        figures["rtf"] = Ratio(run.cost_seconds, np.array(seconds))
        return figures | quality.word_error_figures(*compared)
    overlap, tokenizer = not any(one.chat for one in prompts), context.settings.bleu_tokenizer
    return figures | quality.text_figures(*compared, tokenizer, overlap, greedy)


def check_parity(context: Context, run: Decoded) -> list[Parity]:
    """Compares lossless greedy outputs token by token with plain decoding and `generate`; above
    batch size 1 with the same method at batch size 1."""
    sampling, job = context.settings.decode.sampling, run.job
    if sampling.temperature > 0.0 or not job.lossless or job.kind == "baseline":
        return []
    compared = {"batch size 1": context.alone(run)}
    if run.batch_size == 1:
        references = [one for one in context.decoded if one.batch_size == 1 and one is not run]
        compared = {one.job.name: one for one in references if one.job.way in (PLAIN, GENERATE)}
    ours, limit = (context.pair.model, context.prompts, run.outputs), sampling.max_new_tokens
    return [
        quality.compare_outputs(*ours, one.outputs, limit, name) for name, one in compared.items()
    ]


def make_samples(context: Context) -> list[dict[str, Any]]:
    """Returns one line per prompt: each run's text, and its rounds with token strings."""
    pieces, samples = context.pair.target.tokenizer.convert_ids_to_tokens, []
    temperature = context.settings.decode.sampling.temperature
    for index, prompt in enumerate(context.prompts):
        outputs: dict[str, dict[str, Any]] = {}
        for run in context.decoded[1:]:
            if run.batch_size == 1:
                outputs[run.job.name] = {"text": context.texts[run.job.name][index]}
                if run.job.method is not None:
                    rounds = [metrics.round_facts(one, pieces) for one in run.outputs[index].rounds]
                    outputs[run.job.name]["rounds"] = rounds
        facts = {"row": prompt.row, "temperature": temperature, "source": prompt.text}
        facts |= {"reference": prompt.reference, "plain": context.texts[PLAIN][index]}
        samples.append(facts | {"outputs": outputs})
    return samples
