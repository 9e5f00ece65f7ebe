"""Decode the same inputs with every method, interleaved, and keep the facts.

Timings on a shared machine drift. So every input is decoded by all methods in turn, plain decoding
and Transformers' `generate` among them, in an order that rotates from input to input; the whole is
repeated, and medians are taken for each input over the repeats. Tokenisation is not timed;
encoding the source is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from drafttrain.build.method import Method
from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.kinds import NONE
from drafttrain.config.progress import tracking
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt
from drafttrain.models.loading import LoadedTarget, cache_for_generate

PLAIN = "plain"
GENERATE = "generate"
BEAM = "beam"
RunKind = Literal["plain", "method", "baseline"]


@dataclass(frozen=True)
class Job:
    """A way to decode, and how it decodes prompt number i."""

    name: str
    way: str
    """What a method is called in reports: chain, rsd-s, ...; plain; generate or beam."""
    decode: Callable[[int], Output]
    method: Method | None = None
    """None: a baseline, which is Transformers' own."""


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
    """[R, P], wall clock of each repeat and prompt."""

    @property
    def kind(self) -> RunKind:
        if self.method is None:
            return "baseline"
        return "plain" if self.way == PLAIN else "method"

    @property
    def median_seconds(self) -> Array:
        """[P], medians over the repeats."""
        return np.median(self.seconds, axis=0)

    @property
    def lossless(self) -> bool:
        """Whether the output (or its law, when sampling) is the target's own by construction."""
        return self.way != BEAM if self.method is None else self.method.verifier.lossless


def decode_interleaved(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    progress: bool = False,
) -> list[Decoded]:
    """Decode every prompt by plain decoding, every method and the baselines, interleaved.

    The first result is plain decoding. Raises ValueError, before anything is decoded, for methods
    of the same name and for a verifier that does not fit its drafter or the sampling.
    """
    jobs = make_jobs(target, model, methods, prompts, options)
    return run_interleaved(jobs, len(prompts), options, model.device, progress)


def run_interleaved(
    jobs: Sequence[Job],
    prompts: int,
    options: EvaluationOptions,
    device: torch.device,
    progress: bool = False,
) -> list[Decoded]:
    """What every job did with so many prompts, in the order of the jobs."""
    for prompt in range(min(options.warmup, prompts)):
        for job in jobs:
            job.decode(prompt)
    found: list[list[list[Output]]] = [[[] for _ in range(prompts)] for _ in jobs]
    seconds = np.zeros((len(jobs), options.repeats, prompts))
    with tracking(options.repeats * prompts, "decode", "input", shown=progress) as work:
        for repeat, prompt in product(range(options.repeats), range(prompts)):
            for turn in range(len(jobs)):
                job = (turn + prompt + repeat) % len(jobs)
                output = _timed(jobs[job], prompt, device)
                seconds[job, repeat, prompt] = output.seconds
                found[job][prompt].append(output)
            work.update()
    decoded = []
    for job, outputs, times in zip(jobs, found, seconds, strict=True):
        # of the repeats, which have the same tokens, the one that took the (lower) median time
        kept = [sorted(one, key=lambda o: o.seconds)[(len(one) - 1) // 2] for one in outputs]
        decoded.append(Decoded(job.name, job.way, job.method, kept, times))
    return decoded


def make_jobs(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
) -> list[Job]:
    """Plain decoding first, then the methods, then the baselines."""
    verifier = build_verifier(AUTO, options.sampling)
    plain = Method(NoDrafter(), FixedLength(1), verifier, kind=PLAIN)
    methods = [method for method in methods if method.drafter.name != NONE.name]
    names = [method.name for method in methods]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"methods of the same name: {', '.join(repeated)}; give each once")
    jobs = [Job(PLAIN, PLAIN, _engine(model, plain, prompts, options), plain)]
    for method in methods:
        check_pairing(method.drafter, method.stop, method.verifier, options.sampling)
        jobs.append(Job(method.name, method.kind, _engine(model, method, prompts, options), method))
    if GENERATE in options.baselines:
        jobs.append(Job(GENERATE, GENERATE, _generate(target, model, prompts, options, 1)))
    if BEAM in options.baselines:
        beam = _generate(target, model, prompts, options, options.num_beams)
        jobs.append(Job(f"{GENERATE} beam {options.num_beams}", BEAM, beam))
    return jobs


def _engine(
    model: CachedModel, method: Method, prompts: Sequence[Prompt], options: EvaluationOptions
) -> Callable[[int], Output]:
    """Decoding by this engine; each prompt has random choices of its own, whatever the order."""

    def decode(prompt: int) -> Output:
        return Decoder(
            model,
            method.drafter,
            method.stop,
            method.verifier,
            options.sampling,
            lambda _: sequence_randomness(options.seed, prompts[prompt].row, model.device),
        ).decode_all([prompts[prompt].source], options.max_new_tokens)[0]

    return decode


def _generate(
    target: LoadedTarget,
    model: CachedModel,
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    num_beams: int,
) -> Callable[[int], Output]:
    """Transformers' `generate`, batch 1: beam search, or greedy or sampling as asked."""
    sampling = options.sampling
    settings: dict[str, float | int | bool] = {"do_sample": False, "num_beams": num_beams}
    if num_beams == 1 and not sampling.greedy:
        settings |= {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }

    @torch.inference_mode()
    def decode(prompt: int) -> Output:
        source = prompts[prompt].source
        input_ids = source.input_ids[None]
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices, enabled=bool(settings["do_sample"])):
            if settings["do_sample"]:
                torch.manual_seed(options.seed + prompts[prompt].row)
            generated = target.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=model.max_new_tokens(source, options.max_new_tokens),
                max_length=None,  # the target's own would only be warned about
                **settings,
                **cache_for_generate(target.model),
            )
        tokens = generated[0, len(source.prefix) :].tolist()
        return Output(tokens=_cut_after_eos(tokens, model.eos_ids))

    return decode


def _timed(job: Job, prompt: int, device: torch.device) -> Output:
    _wait(device)
    started = perf_counter()
    output = job.decode(prompt)
    _wait(device)
    output.seconds = perf_counter() - started
    return output


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cut_after_eos(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: position + 1]
    return tokens
