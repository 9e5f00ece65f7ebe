"""Decode the same inputs with every method, interleaved, and keep the facts.

Timings on a shared machine drift. So every input is decoded by all methods in turn, plain decoding
and Transformers' `generate` among them, in an order that rotates from input to input; the whole is
repeated, and medians are taken for each input over the repeats. Where several sequences are decoded
at once, what is taken in turn is a wave: so many consecutive inputs that sequences enter while
others end. Tokenisation is not timed; encoding the source is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from drafttrain.build.method import AUTO, Method, Sizes, build_verifier
from drafttrain.config.kinds import NONE
from drafttrain.config.progress import tracking
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.evaluation.baselines import transformers_jobs
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.prompts import (
    BEAM,
    PLAIN,
    WAVE_BATCHES,
    Decode,
    EvaluationOptions,
    Job,
    Prompt,
)
from drafttrain.models.loading import LoadedTarget

RunKind = Literal["plain", "method", "baseline"]


@dataclass(frozen=True)
class Decoded:
    """What one job did with every prompt."""

    name: str
    way: str
    """As in `Job`."""
    method: Method | None
    outputs: list[Output]
    """[P], each of the repeat that took the median time."""
    seconds: Array
    """[R, P], wall clock of each repeat and prompt, from when its sequence entered to its end."""
    sizes: Sizes = field(default_factory=dict)
    """As in `Job`."""
    costs: Array | None = None
    """[P], what each prompt took of the wall clock; None: all of its own time."""

    @property
    def kind(self) -> RunKind:
        if self.method is None:
            return "baseline"
        return "plain" if self.way == PLAIN else "method"

    @property
    def median_seconds(self) -> Array:
        """[P], medians over the repeats: latency."""
        return np.median(self.seconds, axis=0)

    @property
    def cost_seconds(self) -> Array:
        """[P], the part of the wall clock that each prompt took: throughput. They add up to all
        of it (of each wave, the median over the repeats)."""
        return self.median_seconds if self.costs is None else self.costs

    @property
    def lossless(self) -> bool:
        """Whether the output (or its law, when sampling) is the target's own by construction."""
        if self.method is None:
            return self.way != BEAM
        return self.method.verifier.lossless


def run_interleaved(
    jobs: Sequence[Job],
    prompts: int,
    options: EvaluationOptions,
    device: torch.device,
    progress: bool = False,
    batch_size: int = 1,
) -> list[Decoded]:
    """What every job did with so many prompts, in the order of the jobs; plain decoding is first.

    batch_size: sequences that are decoded at once; the jobs must take it.
    """
    waves = make_waves(prompts, batch_size)
    for wave in waves[: options.warmup if batch_size == 1 else min(options.warmup, 1)]:
        for job in jobs:
            job.decode(wave, batch_size)
    clocks = [_Clock(waves, options.repeats) for _ in jobs]
    what = "decode" if batch_size == 1 else f"decode, batch {batch_size}"
    with tracking(options.repeats * prompts, what, "input", shown=progress) as work:
        for repeat, place in product(range(options.repeats), range(len(waves))):
            for turn in range(len(jobs)):
                job = (turn + place + repeat) % len(jobs)
                outputs, seconds = _timed(jobs[job], waves[place], batch_size, device)
                clocks[job].record(repeat, place, outputs, seconds)
            work.update(len(waves[place]))
    return [
        Decoded(
            job.name,
            job.way,
            job.method,
            clock.median_outputs(),
            clock.seconds,
            job.sizes,
            clock.costs(),
        )
        for job, clock in zip(jobs, clocks, strict=True)
    ]


def make_waves(prompts: int, batch_size: int) -> list[list[int]]:
    """Consecutive groups of prompts: one each at batch size 1; else at least `WAVE_BATCHES`
    times the batch size, of nearly one size, or all where there are not so many."""
    if batch_size == 1:
        return [[prompt] for prompt in range(prompts)]
    waves = max(1, prompts // (WAVE_BATCHES * batch_size))
    return [group.tolist() for group in np.array_split(np.arange(prompts), waves)]


class _Clock:
    """The outputs and times of one job."""

    def __init__(self, waves: Sequence[Sequence[int]], repeats: int) -> None:
        prompts = sum(map(len, waves))
        self.waves = waves
        self.seconds = np.zeros((repeats, prompts))
        self.wave_seconds = np.zeros((repeats, len(waves)))
        self.work = np.zeros((repeats, prompts))
        self.found: list[list[Output]] = [[] for _ in range(prompts)]

    def record(self, repeat: int, place: int, outputs: Sequence[Output], seconds: float) -> None:
        self.wave_seconds[repeat, place] = seconds
        for prompt, output in zip(self.waves[place], outputs, strict=True):
            self.seconds[repeat, prompt] = output.seconds
            self.work[repeat, prompt] = own_seconds(output)
            self.found[prompt].append(output)

    def median_outputs(self) -> list[Output]:
        """Of the repeats, which have the same tokens, those that took the (lower) median time."""
        return [sorted(one, key=lambda o: o.seconds)[(len(one) - 1) // 2] for one in self.found]

    def costs(self) -> Array:
        """[P] the median time of every wave, shared out by what its sequences took of it."""
        waves, work = np.median(self.wave_seconds, axis=0), self.work.mean(axis=0)
        costs = np.zeros(len(work))
        for wave, seconds in zip(self.waves, waves, strict=True):
            parts = work[wave]
            whole = parts.sum()
            costs[wave] = seconds * (parts / whole if whole > 0 else 1.0 / len(wave))
        return costs


def own_seconds(output: Output) -> float:
    """What a sequence took by its rounds' own clocks, its part of shared calls; without rounds, all
    its time."""
    rounds = sum(round.draft_seconds + round.target_seconds for round in output.rounds)
    return rounds if output.rounds else output.seconds


def make_jobs(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
) -> list[Job]:
    """Plain decoding first, then the methods, then the baselines.

    Raises ValueError for methods of the same name, a verifier that does not fit its drafter or the
    sampling, and baselines that need a drafter which no method has.
    """
    verifier = build_verifier(AUTO, options.sampling)
    plain = Method(NoDrafter(), FixedLength(1), verifier, kind=PLAIN)
    methods = [method for method in methods if method.drafter.name != NONE.name]
    names = [method.name for method in methods]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"methods of the same name: {', '.join(repeated)}; give each once")
    jobs = [Job(PLAIN, PLAIN, _engine(model, plain, prompts, options), plain)]
    for method in methods:
        check_pairing(method.drafter, method.stop.rule, method.verifier.rule, options.sampling)
        jobs.append(Job(method.name, method.kind, _engine(model, method, prompts, options), method))
    return jobs + transformers_jobs(target, model, methods, prompts, options)


def decode_by(
    model: CachedModel,
    method: Method,
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    batch_size: int,
) -> list[Output]:
    """Decode prompts by this engine, so many at once, an Output for each in order."""
    return Decoder(
        model,
        method.drafter,
        method.stop,
        method.verifier,
        options.sampling,
        lambda place: sequence_randomness(options.seed, prompts[place].row, model.device),
    ).decode_all([prompt.source for prompt in prompts], options.max_new_tokens, batch_size)


def _engine(
    model: CachedModel, method: Method, prompts: Sequence[Prompt], options: EvaluationOptions
) -> Decode:
    """Decoding by this engine, of the prompts of these numbers."""

    def decode(chosen: Sequence[int], batch_size: int) -> list[Output]:
        return decode_by(model, method, [prompts[place] for place in chosen], options, batch_size)

    return decode


def _timed(
    job: Job, wave: Sequence[int], batch_size: int, device: torch.device
) -> tuple[list[Output], float]:
    """A wave decoded by a job, and its wall clock."""
    _wait(device)
    started = perf_counter()
    outputs = job.decode(wave, batch_size)
    _wait(device)
    seconds = perf_counter() - started
    if batch_size == 1:
        [output] = outputs
        output.seconds = seconds
    return outputs, seconds


def encoder_seconds(model: CachedModel, prompts: Sequence[Prompt], repeats: int) -> Array | None:
    """[P] what encoding each clip takes, alone, medians over the repeats; None for texts."""
    if any(prompt.seconds is None for prompt in prompts):
        return None
    took = np.zeros((repeats, len(prompts)))
    for turn, (place, prompt) in product(range(repeats), enumerate(prompts)):
        _wait(model.device)
        began = perf_counter()
        model.encode(prompt.source)
        _wait(model.device)
        took[turn, place] = perf_counter() - began
    return np.median(took, axis=0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
