"""From decoded prompts to the runs of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafttrain.build.method import Method
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Output
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    draw_resamples,
    estimate_mean,
    estimate_quotient,
    estimate_ratio,
)
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.metrics import (
    Counts,
    acceptance_metrics,
    accepted_tokens,
    count_positions,
    count_rounds,
    first_difference,
    identical,
    measured_costs,
    position_rates,
    walltime_improvement,
)
from drafttrain.evaluation.plots import plot_report
from drafttrain.evaluation.quality import CorpusStatistics, bleu_statistics, quality_metrics
from drafttrain.evaluation.replay import PredictBlocks, plain_outputs, replay_outputs
from drafttrain.evaluation.report import (
    CallCosts,
    DataFacts,
    Difference,
    Parity,
    Report,
    Run,
    SkippedRow,
    TargetFacts,
    TimeShares,
    plot_path,
    samples_path,
    write_report,
    write_samples,
)
from drafttrain.evaluation.runner import (
    GENERATE,
    PLAIN,
    Decoded,
    EvaluationOptions,
    Prompt,
    Skipped,
    decode_interleaved,
    read_prompts,
    top_two_gap,
)
from drafttrain.models.layout import count_parameters
from drafttrain.models.loading import LoadedTarget

QUANTILES = np.linspace(0.0, 1.0, 21)
"""Of the speed-ups of single inputs, in reports."""


@dataclass(frozen=True)
class Evaluation:
    """A report and the samples behind it."""

    report: Report
    samples: list[dict[str, Any]]
    """One for each prompt: texts, and drafted and accepted tokens of every round."""


@dataclass(frozen=True)
class Context:
    """What every run is compared with."""

    target: LoadedTarget
    model: CachedModel
    prompts: Sequence[Prompt]
    options: EvaluationOptions
    decoded: Sequence[Decoded]
    texts: Sequence[Sequence[str]]
    """[runs][P] decoded texts."""
    resamples: Array

    @property
    def references(self) -> list[str | None]:
        return [prompt.reference for prompt in self.prompts]

    def find(self, name: str) -> Decoded | None:
        return next((run for run in self.decoded if run.name == name), None)


def evaluate(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    rows: Any,
    options: EvaluationOptions,
    data_name: str,
    progress: bool = False,
) -> Evaluation:
    """Decode the rows with every method and the baselines, and report what each is worth.

    rows: a `datasets.Dataset` with columns row, source and reference. The report's first run is
    plain decoding in the same engine. Raises ValueError where no row can be decoded.
    """
    prompts, skipped = read_prompts(target, model, rows)
    decoded = decode_interleaved(target, model, methods, prompts, options, progress)
    texts = [
        [target.tokenizer.decode(o.tokens, skip_special_tokens=True) for o in run.outputs]
        for run in decoded
    ]
    resamples = draw_resamples(len(prompts), options.bootstrap, options.seed)
    context = Context(target, model, prompts, options, decoded, texts, resamples)
    report = Report(
        mode="decode",
        target=target_facts(target),
        data=data_facts(data_name, [prompt.reference for prompt in prompts], skipped),
        environment=describe_environment(),
        options=options_facts(options),
        runs=[summarise_run(context, i) for i in range(len(decoded))],
        compared_by=options.compared_by,
    )
    return Evaluation(report, list(make_samples(context)))


def save_evaluation(evaluation: Evaluation, path: Path) -> list[Path]:
    """Write report.json, the samples and the plot; the files, in that order."""
    files = [path, samples_path(path), plot_path(path)]
    write_report(evaluation.report, path)
    write_samples(evaluation.samples, files[1])
    plot_report(evaluation.report, files[2])
    return files


def evaluate_teacher_forced(
    target: LoadedTarget,
    drafters: Sequence[tuple[str, int, PredictBlocks]],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    options: EvaluationOptions,
    data_name: str,
    skipped: Sequence[Skipped] = (),
) -> Report:
    """Acceptance of greedy verification from one parallel pass a sentence; no speed, no texts.

    drafters: (name, k, predict_blocks); pairs: (source_ids, the target's own output). Raises
    ValueError where there are no pairs.
    """
    resamples = draw_resamples(len(pairs), options.bootstrap, options.seed)
    runs = [_replayed_run(PLAIN, "none", None, plain_outputs(pairs), resamples, options)]
    for name, k, predict_blocks in drafters:
        outputs = replay_outputs(predict_blocks, pairs, options.max_new_tokens)
        run_name = f"{name} k={k} greedy"
        runs.append(_replayed_run(run_name, name, k, outputs, resamples, options))
    return Report(
        mode="teacher-forced",
        target=target_facts(target),
        data=data_facts(data_name, [None] * len(pairs), skipped),
        environment=describe_environment(),
        options=options_facts(options),
        runs=runs,
    )


def _replayed_run(
    name: str,
    drafter: str,
    k: int | None,
    outputs: Sequence[Output],
    resamples: Array,
    options: EvaluationOptions,
) -> Run:
    counts = count_rounds(outputs)
    return Run(
        name=name,
        kind="plain" if k is None else "method",
        drafter=drafter,
        stop=None if k is None else f"k={k}",
        verifier="greedy",
        sampling=sampling_facts(options),
        lossless=True,
        settings={} if k is None else {"k": k},
        metrics=acceptance_metrics(counts, resamples),
        by_position=position_rates(count_positions(outputs), resamples),
        totals=totals(counts),
    )


def summarise_run(context: Context, index: int) -> Run:
    """All that one run of an evaluation showed."""
    run = context.decoded[index]
    method = run.method
    metrics: dict[str, Estimate] = {}
    by_position, time, costs = None, None, None
    counts = count_rounds(run.outputs)
    if method is not None:
        metrics |= acceptance_metrics(counts, context.resamples, method.parameter_ratios)
        by_position = position_rates(count_positions(run.outputs), context.resamples)
        time = time_shares(run)
        costs = call_costs(context, run, counts)
        if costs is not None:
            swi = estimate_ratio(walltime_improvement(counts, costs.measured), context.resamples)
            metrics["swi"] = _known(swi)
    metrics |= speed_metrics(context, run)
    metrics |= text_metrics(context, index)
    plain = context.decoded[0]
    if context.options.sampling.greedy and run is not plain:
        same = identical(run.outputs, plain.outputs)
        metrics["identical"] = _known(estimate_mean(same, context.resamples))
    return Run(
        name=run.name,
        kind=run.kind,
        drafter=None if method is None else method.drafter.name,
        stop=None if run.kind != "method" else method.stop.name,
        verifier=None if method is None else method.verifier.name,
        sampling=sampling_facts(context.options),
        lossless=run.lossless,
        settings={} if method is None else dict(method.settings),
        metrics=metrics,
        by_position=by_position,
        parity=check_parity(context, run),
        totals=totals(counts) if method is not None else output_totals(run.outputs),
        time=time,
        costs=costs,
        speedup_quantiles=speedup_quantiles(context, run),
    )


def call_costs(context: Context, run: Decoded, counts: Counts) -> CallCosts | None:
    """What a call of each drafter costs, in calls of the target that decodes plainly."""
    if run.method is None or not run.method.parameter_ratios:
        return None
    plain = [played for output in context.decoded[0].outputs for played in output.rounds]
    target_seconds = sum(played.target_seconds for played in plain) / len(plain)
    by_size = run.method.parameter_ratios
    return CallCosts(
        parameters=dict(by_size),
        measured=measured_costs(counts, list(by_size), target_seconds),
        calls={name: int(calls.sum()) for name, calls in counts.calls.items()}
        or dict.fromkeys(by_size, int(counts.passes.sum())),
    )


def speed_metrics(context: Context, run: Decoded) -> dict[str, Estimate]:
    """Tokens a second and speed-ups; times are medians over the repeats, summed over prompts.

    A speed-up compares the time for the same inputs, whatever the lengths of the outputs; where
    outputs are sampled, and differ in length by chance alone, it compares tokens a second.
    """
    sampled = not context.options.sampling.greedy
    speed = token_rate(run)
    metrics = {"tokens_per_second": _known(estimate_ratio(speed, context.resamples))}
    for name, baseline in speed_baselines(context).items():
        if sampled:
            found = estimate_quotient(speed, token_rate(baseline), context.resamples)
        else:
            times = Ratio(baseline.median_seconds, run.median_seconds)
            found = estimate_ratio(times, context.resamples)
        metrics[name] = _known(found)
    return metrics


def speed_baselines(context: Context) -> dict[str, Decoded]:
    """What speed-ups are over, by their metric's name."""
    baselines = {
        "speedup": context.find(PLAIN),
        "speedup_vs_generate": context.find(GENERATE),
        "speedup_vs_beam": context.find(f"{GENERATE} beam {context.options.num_beams}"),
    }
    return {name: run for name, run in baselines.items() if run is not None}


def speedup_quantiles(context: Context, run: Decoded) -> dict[str, list[float]]:
    """How speed-ups are distributed over single inputs (SpecDec, Figure 6); methods only."""
    if run.kind != "method" or not context.options.sampling.greedy:
        return {}
    return {
        name: np.quantile(baseline.median_seconds / run.median_seconds, QUANTILES).tolist()
        for name, baseline in speed_baselines(context).items()
    }


def token_rate(run: Decoded) -> Ratio:
    """Tokens over seconds."""
    tokens = np.array([float(len(output.tokens)) for output in run.outputs])
    return Ratio(tokens, run.median_seconds)


def text_metrics(context: Context, index: int) -> dict[str, Estimate]:
    """Quality against references, and consistency with the target's own greedy output."""
    texts, references = context.texts[index], context.references
    tokenizer = context.options.bleu_tokenizer
    metrics = quality_metrics(texts, references, context.resamples, tokenizer)

    def bleu(hypotheses: Sequence[str], against: Sequence[str | None]) -> CorpusStatistics:
        return bleu_statistics(hypotheses, against, tokenizer)

    if index > 0 and metrics:
        ours, plain = bleu(texts, references), bleu(context.texts[0], references)
        metrics["bleu_difference"] = ours.difference(plain, context.resamples)
    if index > 0 and context.options.sampling.greedy:
        consistency = bleu(texts, context.texts[0])
        metrics["consistency_bleu"] = consistency.estimate(context.resamples)
    return metrics


def check_parity(context: Context, run: Decoded) -> list[Parity]:
    """Compare lossless greedy outputs, token for token, with plain decoding and with `generate`.

    Where they differ first, plain decoding's top-2 logit gap tells a floating-point tie from an
    error.
    """
    if not (context.options.sampling.greedy and run.lossless):
        return []
    found = []
    for name in (PLAIN, GENERATE):
        other = context.find(name)
        if other is not None and other is not run and run.kind != "baseline":
            found.append(compare_outputs(context, run.outputs, other))
    return found


def compare_outputs(context: Context, outputs: Sequence[Output], other: Decoded) -> Parity:
    """Every first difference of two runs, with plain decoding's top-2 gap there."""
    differences = []
    for prompt, output, expected in zip(context.prompts, outputs, other.outputs, strict=True):
        position = first_difference(output.tokens, expected.tokens)
        if position is not None:
            gap = top_two_gap(
                context.model,
                prompt.source,
                output.tokens[:position],
                context.options.max_new_tokens,
            )
            differences.append(Difference(row=prompt.row, position=position, gap=gap))
    return Parity(
        against=other.name,
        compared=len(outputs),
        identical=len(outputs) - len(differences),
        differences=differences,
    )


def time_shares(run: Decoded) -> TimeShares:
    """Where the time went, by the rounds' own clocks."""
    total = sum(output.seconds for output in run.outputs)
    rounds = [round for output in run.outputs for round in output.rounds]
    draft = sum(round.draft_seconds for round in rounds) / total
    target = sum(round.target_seconds for round in rounds) / total
    return TimeShares(draft=draft, target=target, other=max(0.0, 1.0 - draft - target))


def make_samples(context: Context) -> Iterator[dict[str, Any]]:
    """One line for each prompt: every run's text, and its rounds as pieces of text."""
    pieces: Callable[[list[int]], list[str]] = context.target.tokenizer.convert_ids_to_tokens
    for i, prompt in enumerate(context.prompts):
        outputs = {}
        for run, texts in zip(context.decoded[1:], context.texts[1:], strict=True):
            output = run.outputs[i]
            outputs[run.name] = {"text": texts[i]}
            if run.method is not None:
                outputs[run.name]["rounds"] = [
                    {
                        "drafted": pieces(list(round.drafted)),
                        "accepted": accepted_tokens(round),
                        "emitted": pieces(list(round.emitted)),
                    }
                    for round in output.rounds
                ]
        yield {
            "row": prompt.row,
            "source": prompt.text,
            "reference": prompt.reference,
            "plain": context.texts[0][i],
            "outputs": outputs,
        }


def target_facts(target: LoadedTarget) -> TargetFacts:
    return TargetFacts(
        path=target.path,
        parameters=count_parameters(target.model),
        dtype=str(target.model.dtype).removeprefix("torch."),
        device=str(target.model.device),
    )


def data_facts(
    name: str, references: Sequence[str | None], skipped: Sequence[Skipped]
) -> DataFacts:
    return DataFacts(
        path=name,
        prompts=len(references),
        references=sum(reference is not None for reference in references),
        skipped=[SkippedRow(row=row.row, reason=row.reason) for row in skipped],
    )


def options_facts(options: EvaluationOptions) -> dict[str, Any]:
    facts = asdict(options)
    del facts["sampling"], facts["compared_by"]  # the report has fields for them
    return facts | {"baselines": list(options.baselines)}


def sampling_facts(options: EvaluationOptions) -> dict[str, float]:
    return asdict(options.sampling)


def totals(counts: Counts) -> dict[str, int]:
    return {
        "prompts": len(counts.tokens),
        "tokens": int(counts.tokens.sum()),
        "rounds": int(counts.rounds.sum()),
        "drafted": int(counts.drafted.sum()),
        "accepted": int(counts.accepted.sum()),
        "discarded": int(counts.discarded.sum()),
        "passes": int(counts.passes.sum()),
    }


def output_totals(outputs: Sequence[Output]) -> dict[str, int]:
    return {"prompts": len(outputs), "tokens": sum(len(output.tokens) for output in outputs)}


def _known(estimate: Estimate | None) -> Estimate:
    assert estimate is not None, "times and prompts are never zero"
    return estimate
