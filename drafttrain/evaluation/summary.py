"""From decoded prompts to the runs of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from drafttrain.build.method import Method
from drafttrain.build.sizes import Sizes
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Round
from drafttrain.evaluation.agreement import Judged, target_agreement
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    estimate_mean,
    estimate_median,
    estimate_quotient,
    estimate_ratio,
)
from drafttrain.evaluation.jobs import BEAM, GENERATE, PLAIN
from drafttrain.evaluation.metrics import (
    Counts,
    acceptance_metrics,
    accepted_tokens,
    count_positions,
    count_rounds,
    draft_time,
    identical,
    mean_target_seconds,
    measured_costs,
    position_rates,
    walltime_improvement,
)
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.parity import compare_outputs
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.quality import CorpusStatistics, bleu_statistics, quality_metrics
from drafttrain.evaluation.report import CallCosts, Parity, Run, TimeShares
from drafttrain.evaluation.runner import Decoded
from drafttrain.evaluation.word_errors import word_error_metrics
from drafttrain.models.loading import LoadedTarget

QUANTILES = np.linspace(0.0, 1.0, 21)
"""Of the speed-ups of single inputs, in reports."""


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
    encode_seconds: Array | None = None
    """[P] the encoder's share of each clip's time; None where the inputs are texts."""
    judged: Judged = field(default_factory=dict)
    """Filled as runs are summed up."""

    @property
    def clip_seconds(self) -> Array:
        """[P] how long the clips are."""
        return np.array([prompt.seconds for prompt in self.prompts], dtype=np.float64)

    @property
    def compares_lossy(self) -> bool:
        """Whether a method among the runs is lossy."""
        return any(run.kind == "method" and not run.lossless for run in self.decoded)

    def find(self, way: str) -> Decoded | None:
        """Plain decoding, or a baseline, if it was measured."""
        return next((run for run in self.decoded if run.way == way), None)


def summarise_run(context: Context, index: int) -> Run:
    """All that one run of an evaluation showed."""
    run = context.decoded[index]
    method = run.method
    metrics: dict[str, Estimate] = {}
    per_position, time, costs = None, None, None
    counts = count_rounds(run.outputs)
    totals = {"tokens": sum(len(output.tokens) for output in run.outputs)}
    sizes: Sizes = dict(run.sizes)
    if method is not None:
        totals, sizes = counts.totals(), dict(method.sizes)
        metrics |= acceptance_metrics(counts, context.resamples, method.parameter_ratios)
        per_position = position_rates(count_positions(run.outputs), context.resamples)
        time = time_shares(run)
        target_seconds = mean_target_seconds(context.decoded[0].outputs)
        costs = call_costs(method, counts, target_seconds)
        if costs is not None:
            swi = walltime_improvement(counts, costs.measured)
            took = draft_time(counts, target_seconds)
            metrics["swi"] = estimate_ratio(swi, context.resamples)
            metrics["draft_time"] = estimate_ratio(took, context.resamples)
    metrics |= speed_metrics(context, run)
    metrics |= real_time_factors(context, run)
    metrics |= text_metrics(context, index)
    if run.kind != "baseline" and context.compares_lossy:
        metrics["target_agreement"] = target_agreement(
            context.model,
            context.prompts,
            run.outputs,
            context.options,
            context.resamples,
            context.judged,
        )
    plain = context.decoded[0]
    if context.options.sampling.greedy and run is not plain:
        same = identical(run.outputs, plain.outputs)
        metrics["identical"] = estimate_mean(same, context.resamples)
    return Run(
        name=run.name,
        kind=run.kind,
        method=run.way,
        sizes=sizes,
        drafter=None if method is None else method.drafter.name,
        other=None if method is None else method.other,
        parameters=None if method is None else method.parameters,
        stop=None if run.kind != "method" else method.stop.name,
        verifier=None if method is None else method.verifier.name,
        sampling=asdict(context.options.sampling),
        lossless=run.lossless,
        settings={} if method is None else dict(method.settings),
        metrics=metrics,
        acceptance_rate_per_position=per_position,
        parity=check_parity(context, run),
        totals={"prompts": len(run.outputs), **totals},
        time=time,
        costs=costs,
        speedup_quantiles=speedup_quantiles(context, run),
    )


def call_costs(method: Method | None, counts: Counts, target_seconds: float) -> CallCosts | None:
    """What a call of each drafter costs, in calls of the target that decodes plainly."""
    if method is None or not method.parameter_ratios:
        return None
    by_size = method.parameter_ratios
    return CallCosts(
        parameters=dict(by_size),
        measured=measured_costs(counts, list(by_size), target_seconds),
        calls={name: int(calls.sum()) for name, calls in counts.calls.items()}
        or dict.fromkeys(by_size, int(counts.passes.sum())),
    )


def speed_metrics(context: Context, run: Decoded) -> dict[str, Estimate]:
    """Tokens a second, latency and speed-ups; times are medians over the repeats.

    Tokens a second and speed-ups are of all inputs together, latency is the median of single ones.
    A speed-up compares the time for the same inputs, whatever the lengths of the outputs; where
    outputs are sampled, and differ in length by chance alone, it compares tokens a second.
    """
    sampled = not context.options.sampling.greedy
    speed = token_rate(run)
    latency = 1e3 * run.median_seconds / token_counts(run)
    metrics = {
        "tokens_per_second": estimate_ratio(speed, context.resamples),
        "ms_per_token": estimate_median(latency, context.resamples),
    }
    for name, baseline in speed_baselines(context).items():
        if sampled:
            metrics[name] = estimate_quotient(speed, token_rate(baseline), context.resamples)
        else:
            times = Ratio(baseline.cost_seconds, run.cost_seconds)
            metrics[name] = estimate_ratio(times, context.resamples)
    return metrics


def real_time_factors(context: Context, run: Decoded) -> dict[str, Estimate]:
    """Seconds of work over seconds of audio: whole, and split into encoder and all that follows.

    The encoder's are measured apart, as it is the same for all but programs of their own, whose
    encoder is another: of them only the whole is known. Empty for texts.
    """
    if context.encode_seconds is None:
        return {}
    parts = {"rtf": run.cost_seconds}
    encoder = np.minimum(context.encode_seconds, run.cost_seconds)
    parts |= {"rtf_encoder": encoder, "rtf_decoder": run.cost_seconds - encoder}
    audio = context.clip_seconds
    return {
        name: estimate_ratio(Ratio(took, audio), context.resamples) for name, took in parts.items()
    }


def speed_baselines(context: Context) -> dict[str, Decoded]:
    """What speed-ups are over, by their metric's name."""
    baselines = {
        "speedup": context.find(PLAIN),
        "speedup_vs_generate": context.find(GENERATE),
        "speedup_vs_beam": context.find(BEAM),
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
    return Ratio(token_counts(run), run.cost_seconds)


def token_counts(run: Decoded) -> Array:
    """[P] tokens of every output."""
    return np.array([float(len(output.tokens)) for output in run.outputs])


def text_metrics(context: Context, index: int) -> dict[str, Estimate]:
    """Quality against references, and how near the target's own greedy output a text is.

    BLEU and chrF are of texts only: a good answer in a chat may share few words with another one,
    so chats have neither, against references or against plain decoding. Transcripts have the word
    error rate instead.
    """
    texts = context.texts[index]
    references = [prompt.reference for prompt in context.prompts]
    if context.encode_seconds is not None:
        plain = context.texts[0] if index > 0 else None
        return word_error_metrics(texts, references, context.resamples, plain)
    tokenizer = context.options.bleu_tokenizer
    chats = any(prompt.chat for prompt in context.prompts)
    metrics = quality_metrics(texts, references, context.resamples, tokenizer, overlap=not chats)

    def bleu(hypotheses: Sequence[str], against: Sequence[str | None]) -> CorpusStatistics:
        return bleu_statistics(hypotheses, against, tokenizer)

    if index > 0 and "bleu" in metrics:
        ours, plain = bleu(texts, references), bleu(context.texts[0], references)
        metrics["bleu_difference"] = ours.difference(plain, context.resamples)
    if index > 0 and context.options.sampling.greedy and not chats:
        consistency = bleu(texts, context.texts[0])
        metrics["consistency_bleu"] = consistency.estimate(context.resamples)
    return metrics


def check_parity(context: Context, run: Decoded) -> list[Parity]:
    """Compare lossless greedy outputs, token for token, with plain decoding and with `generate`."""
    if not (context.options.sampling.greedy and run.lossless) or run.kind == "baseline":
        return []
    others = [other for way in (PLAIN, GENERATE) if (other := context.find(way)) is not None]
    return [
        compare_outputs(
            context.model,
            context.prompts,
            run.outputs,
            other.outputs,
            context.options.max_new_tokens,
            other.name,
        )
        for other in others
        if other is not run
    ]


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
                outputs[run.name]["rounds"] = [round_pieces(one, pieces) for one in output.rounds]
        yield {
            "row": prompt.row,
            "temperature": context.options.sampling.temperature,
            "source": prompt.text,
            "reference": prompt.reference,
            "plain": context.texts[0][i],
            "outputs": outputs,
        }


def round_pieces(
    played: Round, pieces: Callable[[list[int]], list[str]]
) -> dict[str, int | list[int] | list[str]]:
    """A round as samples have it; of a tree also which of the drafted tokens were accepted."""
    accepted = accepted_tokens(played)
    path = {} if played.depth is None else {"path": list(played.path[:accepted])}
    drafted, emitted = pieces(list(played.drafted)), pieces(list(played.emitted))
    return {"drafted": drafted, "accepted": accepted, **path, "emitted": emitted}
