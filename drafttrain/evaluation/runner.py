"""Decode the same inputs with every method and baseline, interleaved, and keep the facts.

Timings on a shared machine drift. So every input is decoded by all methods in turn, plain decoding
and Transformers' `generate` among them, in an order that rotates from input to input; the whole is
repeated, and medians are taken for each input over the repeats. Where several sequences are decoded
at once, what is taken in turn is a wave: so many consecutive inputs that sequences enter while
others end. Tokenisation is not timed; encoding the source is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.build.method import AUTO, Method, Sizes, build_verifier
from drafttrain.config.kinds import NONE
from drafttrain.config.progress import tracking
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.architectures import WHISPER_LIKE
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.padding import padded
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.prompts import (
    ASSISTED,
    BEAM,
    GENERATE,
    PLAIN,
    EvaluationOptions,
    Prompt,
)
from drafttrain.models.loading import LoadedTarget, cache_for_generate

WAVE_BATCHES = 4
"""Batches of prompts, at least, that a job decodes in turn at batch sizes above 1."""


@dataclass(frozen=True)
class Job:
    """A way to decode, and its decoding of prompts."""

    name: str
    way: str
    """Its name in reports, without sizes: chain, rsd-s, ... of a method; plain; generate, beam or
    assisted."""
    decode: Callable[[Sequence[int], int], list[Output]]
    """(indices of prompts, batch size) -> an output for each, in order. `Output.seconds` of a
    prompt in a batch is from when its sequence entered to its end; the caller times a prompt
    decoded alone."""
    method: Method | None = None
    """None: a baseline, which is Transformers' own."""
    sizes: Sizes = field(default_factory=dict)
    """Of a baseline: beams, k."""
    largest_batch: int | None = None
    """Largest batch size that it takes; None: any."""

    def takes(self, batch_size: int) -> bool:
        """Whether it decodes at this batch size."""
        return self.largest_batch is None or batch_size <= self.largest_batch

    @property
    def kind(self) -> Literal["plain", "method", "baseline"]:
        if self.method is None:
            return "baseline"
        return "plain" if self.way == PLAIN else "method"

    @property
    def lossless(self) -> bool:
        """Whether the output (or its law, when sampling) is the target's own by construction."""
        return self.way != BEAM if self.method is None else self.method.verifier.lossless


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
    decoder = method.decoder(model, options.sampling, options.seed, lambda i: prompts[i].row)
    sources = [prompt.source for prompt in prompts]
    return decoder.decode_all(sources, options.max_new_tokens, batch_size)


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


def transformers_jobs(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
) -> list[Job]:
    """The baselines asked for, which are Transformers' own ways to decode.

    `assisted` drafts with the language models that the methods draft with, a job for each of them
    and each draft length. It takes one sequence at a time, and drops a speech target's
    begin_suppress_tokens: the job's name says so. Raises ValueError where no method has one.
    """

    def job(name: str, way: str, sizes: Sizes, largest: int | None = None, **how: Any) -> Job:
        own = Generate(target.model, model, prompts, options, how)
        return Job(name, way, own.decode, sizes=sizes, largest_batch=largest)

    jobs, beams = [], options.num_beams
    if GENERATE in options.baselines:
        jobs.append(job(GENERATE, GENERATE, {}))
    if BEAM in options.baselines:
        jobs.append(job(f"{GENERATE} beam {beams}", BEAM, {"beams": beams}, num_beams=beams))
    if ASSISTED not in options.baselines:
        return jobs
    begins = target.model.generation_config.begin_suppress_tokens
    dropped = (
        ", no begin_suppress_tokens" if begins and isinstance(target.model, WHISPER_LIKE) else ""
    )
    assisted: dict[tuple[int, int], Job] = {}
    for method in methods:
        k, drafter = method.stop.longest, method.label or method.drafter.name
        if method.assistant is not None and (id(method.assistant), k) not in assisted:
            name = f"{ASSISTED} {drafter} k={k}, constant, confidence 0{dropped}"
            steady = steady_assistant(method.assistant, k)
            found = job(name, ASSISTED, {"k": k}, 1, assistant_model=steady)
            assisted[id(method.assistant), k] = found
    if not assisted:
        raise ValueError(
            f"baselines has {ASSISTED!r}, but no method drafts with a language model; give one as "
            f"the drafter or among others, or leave {ASSISTED!r} out"
        )
    return [*jobs, *assisted.values()]


def steady_assistant(model: PreTrainedModel, k: int) -> PreTrainedModel:
    """A copy that shares the weights, whose own settings make assisted generation draft k tokens in
    every round."""
    assistant = copy.copy(model)
    assistant.generation_config = copy.deepcopy(model.generation_config)
    assistant.generation_config.update(
        num_assistant_tokens=k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return assistant


@dataclass(frozen=True)
class Generate:
    """Transformers' `generate` over prompts, in padded batches."""

    target: PreTrainedModel
    model: CachedModel
    prompts: Sequence[Prompt]
    options: EvaluationOptions
    settings: dict[str, Any] = field(default_factory=dict)
    """Beside how to sample: num_beams, assistant_model."""

    @torch.inference_mode()
    def decode(self, chosen: Sequence[int], batch_size: int) -> list[Output]:
        """Batches of the prompts as they come; a sequence takes as long as its batch."""
        outputs = []
        for start in range(0, len(chosen), batch_size):
            batch = [self.prompts[place] for place in chosen[start : start + batch_size]]
            began = perf_counter()
            found = self._batch(batch)
            seconds = perf_counter() - began
            outputs += [Output(tokens=tokens, seconds=seconds) for tokens in found]
        return outputs

    def _batch(self, batch: Sequence[Prompt]) -> list[list[int]]:
        """New tokens of each prompt; those with fewer positions left are decoded apart."""
        wanted = self.options.max_new_tokens
        limits = [self.model.max_new_tokens(prompt.source, wanted) for prompt in batch]
        found: list[list[int]] = [[] for _ in batch]
        for limit in sorted(set(limits)):
            places = [place for place, own in enumerate(limits) if own == limit]
            generated = self._generate([batch[place] for place in places], limit)
            for place, tokens in zip(places, generated, strict=True):
                found[place] = cut_after_eos(tokens, self.model.eos_ids)
        return found

    def _generate(self, batch: Sequence[Prompt], limit: int) -> list[list[int]]:
        if isinstance(self.target, WHISPER_LIKE):
            # returned without what the decoder starts from and without EOS, which ended an output
            # that is shorter than it might be
            features = torch.stack([prompt.source.inputs["input_features"] for prompt in batch])
            generated = self._call(batch, limit, input_features=features.to(self.target.dtype))
            [end] = self.model.eos_ids
            return [[*tokens, end][:limit] for tokens in generated.tolist()]
        decoder_only = not self.model.is_encoder_decoder
        padding = self.target.generation_config.pad_token_id
        input_ids, mask = padded(
            [prompt.source.input_ids for prompt in batch],
            0 if padding is None else padding,  # masked, so that any token will do
            "left" if decoder_only else "right",
        )
        cache = cache_for_generate(self.target)
        generated = self._call(batch, limit, inputs=input_ids, attention_mask=mask, **cache)
        first = input_ids.shape[1] if decoder_only else len(batch[0].source.prefix)
        return generated[:, first:].tolist()

    def _call(self, batch: Sequence[Prompt], limit: int, **inputs: Any) -> Tensor:
        sampling, how = self.options.sampling, {"num_beams": 1, **self.settings}
        how["do_sample"] = how["num_beams"] == 1 and not sampling.greedy
        if how["do_sample"]:
            how |= asdict(sampling)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices, enabled=how["do_sample"]):
            if how["do_sample"]:
                torch.manual_seed(self.options.seed + batch[0].row)
            # max_length: the target's own would only be warned about
            return self.target.generate(**inputs, max_new_tokens=limit, max_length=None, **how)


def cut_after_eos(tokens: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first EOS, which is kept."""
    end = next((place for place, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return list(tokens[: end + 1])
