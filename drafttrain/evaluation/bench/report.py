"""What `drafttrain bench` writes: servers side by side, at every concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drafttrain.config.base import ConfigError
from drafttrain.config.serving import BenchConfig
from drafttrain.evaluation.bench.measure import Side, Wave, identical_outputs
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    draw_resamples,
    estimate_median,
    estimate_quotient,
    estimate_ratio,
)
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.report import DataFacts, Part, ServedRun, read_report
from drafttrain.evaluation.served.rules import served_by_default


class SideResult(Part):
    """One server at one concurrency."""

    side: str
    """without, with (the drafter), or server, where only one was measured."""
    metrics: dict[str, Estimate]
    """tokens_per_second: output tokens over the time of the waves. tokens_per_second_per_user: of
    single answers, behind their first token. ms_to_first_token: median. draft_acceptance_rate:
    accepted over drafted tokens. tokens_per_step: output tokens of a call of the target, behind
    the first. speedup: tokens_per_second over that without the drafter."""
    totals: dict[str, int]
    """Prompts, tokens; draft_tokens and accepted_tokens by the server's own counters."""


class Level(Part):
    """Both servers at one concurrency."""

    concurrency: int
    sides: list[SideResult]
    compared: int = 0
    """Prompts whose tokens both servers tell, at temperature 0."""
    identical: int = 0
    """Those with the same tokens on both sides."""


class BenchReport(Part):
    """What `drafttrain bench` measured."""

    target: str
    data: DataFacts
    environment: Environment
    options: dict[str, Any]
    """Draft length, p-min, sampling, and the servers' programs by side."""
    levels: list[Level]
    predicted: ServedRun | None = None
    """What the report of `drafttrain eval` expects under these settings."""


def predicted_run(settings: BenchConfig) -> ServedRun | None:
    """The row of the given report for this draft length and p-min, by the rule that engines go by
    if not told otherwise; None where no report is given. Raises ValueError where it has no such
    row."""
    if settings.report is None:
        return None
    if not settings.report.is_file():
        raise ConfigError(f"report = {str(settings.report)!r}: no such file")
    served = read_report(settings.report).served
    rule = served_by_default(settings.sampling.temperature == 0.0).name
    k, p_min = settings.llama.n_max, settings.llama.p_min
    found = [one for one in served if (one.rule, one.k, one.p_min) == (rule, k, p_min)]
    if not found:
        rows = sorted({f"k={one.k} p-min={one.p_min:g}" for one in served if one.rule == rule})
        raise ConfigError(
            f"report = {str(settings.report)!r} predicts nothing for rule {rule!r}, --n-max {k} "
            f"and --p-min {p_min:g} (it has {', '.join(rows) or 'no such rule'}); make one with "
            "`drafttrain eval --mode teacher-forced --sweep k=...`"
        )
    return found[0]


def level_of(
    sides: Sequence[Side],
    waves: Sequence[Sequence[Wave]],
    concurrency: int,
    greedy: bool,
    resamples: int,
) -> Level:
    """The metrics of a level, bootstrapped over waves (medians: over prompts)."""
    drawn = draw_resamples(len(waves[0]), resamples)
    speeds = [_speed(own) for own in waves]
    results = []
    for side, own, speed in zip(sides, waves, speeds, strict=True):
        metrics = _metrics(own, drawn, resamples)
        if speed is not speeds[0]:
            metrics["speedup"] = estimate_quotient(speed, speeds[0], drawn)
        shown = {name: one for name, one in metrics.items() if one is not None}
        results.append(SideResult(side=side.name, metrics=shown, totals=_totals(own)))
    same = list(identical_outputs(waves)) if greedy and len(sides) == 2 else []
    return Level(concurrency=concurrency, sides=results, compared=len(same), identical=sum(same))


def _speed(waves: Sequence[Wave]) -> Ratio:
    return Ratio(_made(waves), np.array([wave.seconds for wave in waves]))


def _made(waves: Sequence[Wave]) -> Array:
    return np.array([sum(one.made_tokens for one in wave.answers) for wave in waves], dtype=float)


def _metrics(waves: Sequence[Wave], drawn: Array, resamples: int) -> dict[str, Estimate | None]:
    answers = [one for wave in waves for one in wave.answers]
    over_answers = draw_resamples(len(answers), resamples)
    behind_first = np.array([one.made_tokens - 1.0 for one in answers])
    took = np.array([one.seconds - one.first_seconds for one in answers])
    first = np.array([1000.0 * one.first_seconds for one in answers])
    metrics = {
        "tokens_per_second": estimate_ratio(_speed(waves), drawn),
        "tokens_per_second_per_user": estimate_ratio(Ratio(behind_first, took), over_answers),
        "ms_to_first_token": estimate_median(first, over_answers),
    }
    drafted = np.array([wave.draft_tokens or 0 for wave in waves], dtype=float)
    if not drafted.sum():
        return metrics
    accepted = np.array([wave.accepted_tokens or 0 for wave in waves], dtype=float)
    # a call emits what it accepted and one token more; the first token is of the prompt's own call
    made = _made(waves) - np.array([len(wave.answers) for wave in waves])
    return metrics | {
        "draft_acceptance_rate": estimate_ratio(Ratio(accepted, drafted), drawn),
        "tokens_per_step": estimate_ratio(Ratio(made, made - accepted), drawn),
    }


def _totals(waves: Sequence[Wave]) -> dict[str, int]:
    totals = {
        "prompts": sum(len(wave.answers) for wave in waves),
        "tokens": int(_made(waves).sum()),
    }
    if any(wave.draft_tokens for wave in waves):
        totals["draft_tokens"] = sum(wave.draft_tokens or 0 for wave in waves)
        totals["accepted_tokens"] = sum(wave.accepted_tokens or 0 for wave in waves)
    return totals
