"""From decoded prompts to the runs of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from drafttrain.build.method import Method
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Round
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    estimate_difference,
    estimate_mean,
    estimate_median,
    estimate_quotient,
    estimate_ratio,
)
from drafttrain.evaluation.metrics import (
    Counts,
    acceptance_metrics,
    accepted_tokens,
    count_positions,
    count_rounds,
    draft_time,
    identical,
    mean_acceptance_length,
    mean_target_seconds,
    measured_costs,
    position_rates,
    walltime_improvement,
)
from drafttrain.evaluation.prompts import BEAM, GENERATE, PLAIN, EvaluationOptions, Prompt
from drafttrain.evaluation.quality import (
    CorpusStatistics,
    Judged,
    bleu_statistics,
    compare_outputs,
    quality_metrics,
    target_agreement,
    word_error_metrics,
)
from drafttrain.evaluation.report import CallCosts, Parity, Run, TimeShares
from drafttrain.evaluation.runner import Decoded
from drafttrain.models.loading import LoadedTarget


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
    def compares_lossy(self) -> bool:
        """Whether a method among the runs is lossy."""
        return any(run.kind == "method" and not run.lossless for run in self.decoded)

    def find(self, way: str) -> Decoded | None:
        """Plain decoding, or a baseline, if it was measured."""
        return next((run for run in self.decoded if run.way == way), None)


def summarise_run(context: Context, index: int) -> Run:
    """All figures of one run."""
    run, resamples = context.decoded[index], context.resamples
    method, plain, greedy = run.method, context.decoded[0], context.options.sampling.greedy
    counts = count_rounds(run.outputs)
    totals: dict[str, int | float] = {"tokens": sum(len(output.tokens) for output in run.outputs)}
    found: dict[str, Any] = {}
    metrics: dict[str, Estimate] = {}
    if method is not None:
        totals = counts.totals()
        metrics |= acceptance_metrics(counts, resamples, method.parameter_ratios)
        found["acceptance_rate_per_position"] = position_rates(
            count_positions(run.outputs), resamples
        )
        found["time"] = time_shares(run)
        target_seconds = mean_target_seconds(plain.outputs)
        costs = found["costs"] = call_costs(method, counts, target_seconds)
        if costs is not None:
            swi = walltime_improvement(counts, costs.measured)
            metrics["swi"] = estimate_ratio(swi, resamples)
            metrics["draft_time"] = estimate_ratio(draft_time(counts, target_seconds), resamples)
    metrics |= speed_metrics(context, run)
    metrics |= real_time_factors(context, run)
    metrics |= text_metrics(context, index)
    if run.kind != "baseline" and context.compares_lossy:
        metrics["target_agreement"] = target_agreement(
            context.model, context.prompts, run.outputs, context.options, resamples, context.judged
        )
    if greedy and run is not plain:
        metrics["identical"] = estimate_mean(identical(run.outputs, plain.outputs), resamples)
    if method is None:
        facts = {
            "name": run.name,
            "kind": "baseline",
            "method": run.way,
            "sizes": dict(run.sizes),
            "sampling": asdict(context.options.sampling),
            "lossless": run.lossless,
        }
    else:
        facts = method_facts(None if run is plain else method, context.options)
    totals = {"prompts": len(run.outputs), **totals}
    parity = check_parity(context, run)
    return Run(**facts, **found, metrics=metrics, parity=parity, totals=totals)


def method_facts(method: Method | None, options: EvaluationOptions) -> dict[str, Any]:
    """The fields of a run that its method decides; None: plain decoding."""
    sampling = asdict(options.sampling)
    if method is None:
        verifier = "greedy" if options.sampling.greedy else "rejection"
        facts = {"name": PLAIN, "kind": "plain", "method": PLAIN, "drafter": "none"}
        return facts | {"verifier": verifier, "sampling": sampling, "lossless": True}
    return {
        "name": method.name,
        "kind": "method",
        "method": method.kind,
        "sizes": dict(method.sizes),
        "drafter": method.drafter.name,
        "other": method.other,
        "parameters": method.parameters,
        "stop": method.stop.name,
        "verifier": method.verifier.name,
        "sampling": sampling,
        "lossless": method.verifier.lossless,
        "settings": dict(method.settings),
    }


def compare_with_first(
    runs: Sequence[Run],
    methods: Sequence[Method | None],
    counts: Sequence[Counts],
    resamples: Array,
) -> list[Run]:
    """The runs, those of `others` with their paired differences to the first drafter's.

    `mean_acceptance_length_difference` and `mbsu_difference` are to the first drafter's run at the
    same settings (k, ...), or to its first run if there is none. methods: None for a baseline.
    """

    def ratios(place: int) -> dict[str, Ratio]:
        method, own = methods[place], counts[place]
        found = {"mean_acceptance_length": mean_acceptance_length(own)}
        if method is not None and method.parameter_ratios:
            found["mbsu"] = walltime_improvement(own, method.parameter_ratios)
        return found

    drafting = [place for place, run in enumerate(runs) if run.kind == "method"]
    own = [place for place in drafting if runs[place].other == runs[drafting[0]].other]
    found = list(runs)
    for place in drafting:
        if place in own:
            continue
        same = [first for first in own if runs[first].settings == runs[place].settings]
        first = (same or own)[0]
        ours, theirs = ratios(place), ratios(first)
        differences = {
            f"{name}_difference": estimate_difference(ours[name], theirs[name], resamples)
            for name in sorted(ours.keys() & theirs.keys())
        }
        metrics = runs[place].metrics | {k: one for k, one in differences.items() if one}
        update = {"compared_with": runs[first].name, "metrics": metrics}
        found[place] = runs[place].model_copy(update=update)
    return found


def call_costs(method: Method, counts: Counts, target_seconds: float) -> CallCosts | None:
    """What a call of each drafter costs, in calls of the target that decodes plainly."""
    if not method.parameter_ratios:
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
    ways = {"speedup": PLAIN, "speedup_vs_generate": GENERATE, "speedup_vs_beam": BEAM}
    for name, way in ways.items():
        baseline = context.find(way)
        if baseline is None:
            continue
        if sampled:
            metrics[name] = estimate_quotient(speed, token_rate(baseline), context.resamples)
        else:
            times = Ratio(baseline.cost_seconds, run.cost_seconds)
            metrics[name] = estimate_ratio(times, context.resamples)
    return metrics


def real_time_factors(context: Context, run: Decoded) -> dict[str, Estimate]:
    """Seconds of work over seconds of audio: whole, and split into encoder and all that follows.

    The encoder is measured alone, as it is the same for all. Empty for texts.
    """
    if context.encode_seconds is None:
        return {}
    encoder = np.minimum(context.encode_seconds, run.cost_seconds)
    parts = {"rtf": run.cost_seconds, "rtf_encoder": encoder}
    parts["rtf_decoder"] = run.cost_seconds - encoder
    audio = np.array([prompt.seconds for prompt in context.prompts], dtype=np.float64)
    return {
        name: estimate_ratio(Ratio(took, audio), context.resamples) for name, took in parts.items()
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
