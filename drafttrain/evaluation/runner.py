"""Decode the same inputs with every method, interleaved, and keep the facts.

Timings on a shared machine drift. So every input is decoded by all methods in turn, plain decoding
and Transformers' `generate` among them, in an order that rotates from input to input; the whole is
repeated, and medians are taken for each input over the repeats. Where several sequences are decoded
at once, what is taken in turn is a wave: so many consecutive inputs that sequences enter while
others end. Tokenisation is not timed; encoding the source is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from time import perf_counter

import numpy as np
import torch

from drafttrain.build.method import AUTO, Method, build_verifier
from drafttrain.config.kinds import NONE
from drafttrain.config.progress import tracking
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.evaluation.baselines import transformers_jobs
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.prompts import PLAIN, EvaluationOptions, Job, Prompt
from drafttrain.models.loading import LoadedTarget

WAVE_BATCHES = 4
"""Batches of prompts, at least, that a job decodes in turn at batch sizes above 1."""


@dataclass(frozen=True)
class Decoded:
    """What one job did with every prompt at a batch size."""

    job: Job
    batch_size: int
    outputs: list[Output]
    """[P], each of the repeat that took the (lower) median time; all have the same tokens."""
    seconds: Array
    """[R, P], wall clock of each repeat and prompt, from when its sequence entered to its end."""
    cost_seconds: Array
    """[P], the part of the wall clock that each prompt took: throughput. They add up to all of it:
    the median time of every wave is shared out by what its sequences took of shared calls."""
    memory_bytes: int | None = None
    """Peak memory of a wave, where it was measured."""

    @property
    def median_seconds(self) -> Array:
        """[P], medians over the repeats: latency."""
        return np.median(self.seconds, axis=0)


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
    waves, repeats = make_waves(prompts, batch_size), range(options.repeats)
    for wave in waves[: options.warmup if batch_size == 1 else min(options.warmup, 1)]:
        for job in jobs:
            job.decode(wave, batch_size)
    wave_seconds = np.zeros((len(jobs), options.repeats, len(waves)))
    found: list[list[list[Output]]] = [[[] for _ in range(prompts)] for _ in jobs]
    what = "decode" if batch_size == 1 else f"decode, batch {batch_size}"
    with tracking(options.repeats * prompts, what, "input", shown=progress) as work:
        for repeat, place in product(repeats, range(len(waves))):
            for turn in range(len(jobs)):
                job = (turn + place + repeat) % len(jobs)
                outputs, seconds = _timed(jobs[job], waves[place], batch_size, device)
                wave_seconds[job, repeat, place] = seconds
                for prompt, output in zip(waves[place], outputs, strict=True):
                    found[job][prompt].append(output)
            work.update(len(waves[place]))
    decoded = []
    for job, times, outputs in zip(jobs, np.median(wave_seconds, axis=1), found, strict=True):
        work_done = np.array([[own_seconds(one) for one in own] for own in outputs]).mean(axis=1)
        costs = np.zeros(prompts)
        for wave, seconds in zip(waves, times, strict=True):
            whole = work_done[wave].sum()
            costs[wave] = seconds * (work_done[wave] / whole if whole > 0 else 1.0 / len(wave))
        took = np.array([[one.seconds for one in own] for own in outputs]).T
        middle = [sorted(own, key=lambda o: o.seconds)[(len(own) - 1) // 2] for own in outputs]
        decoded.append(Decoded(job, batch_size, middle, took, costs))
    return decoded


def make_waves(prompts: int, batch_size: int) -> list[list[int]]:
    """Consecutive groups of prompts: one each at batch size 1; else at least `WAVE_BATCHES`
    times the batch size, of nearly one size, or all where there are not so many."""
    if batch_size == 1:
        return [[prompt] for prompt in range(prompts)]
    waves = max(1, prompts // (WAVE_BATCHES * batch_size))
    return [group.tolist() for group in np.array_split(np.arange(prompts), waves)]


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
    methods = [method for method in methods if method.drafter.name != NONE.name]
    names = [method.name for method in methods]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"methods of the same name: {', '.join(repeated)}; give each once")
    jobs = []
    for method in (plain_method(options.sampling), *methods):
        check_pairing(method.drafter, method.stop.rule, method.verifier.rule, options.sampling)

        def decode(chosen: Sequence[int], size: int, method: Method = method) -> list[Output]:
            return decode_by(model, method, [prompts[place] for place in chosen], options, size)

        jobs.append(Job(method.name, method.kind, decode, method))
    return jobs + transformers_jobs(target, model, methods, prompts, options)


def plain_method(sampling: Sampling) -> Method:
    """Plain decoding by this engine."""
    verifier = build_verifier(AUTO, sampling)
    return Method(NoDrafter(), FixedLength(1), verifier, label=PLAIN, kind=PLAIN)


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


def _timed(
    job: Job, wave: Sequence[int], batch_size: int, device: torch.device
) -> tuple[list[Output], float]:
    """A wave decoded by a job, and its wall clock, all that a GPU still does included."""
    _wait(device)
    began = perf_counter()
    outputs = job.decode(wave, batch_size)
    _wait(device)
    seconds = perf_counter() - began
    if batch_size == 1:
        outputs[0].seconds = seconds
    return outputs, seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
