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
from datasets import Dataset

from drafttrain.build.method import Method, build_sampling
from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.commands import EvalConfig
from drafttrain.config.kinds import NONE
from drafttrain.config.progress import tracking
from drafttrain.data.inputs.tokens import tokenize_prompts
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel, make_source
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.report import TreeAxis
from drafttrain.models.loading import LoadedTarget, cache_for_generate

PLAIN = "plain"
GENERATE = "generate"


@dataclass(frozen=True)
class EvaluationOptions:
    """How to decode and how often."""

    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    seed: int = 0
    baselines: Sequence[Literal["generate", "beam"]] = ("generate", "beam")
    num_beams: int = 5
    repeats: int = 3
    warmup: int = 3
    bootstrap: int = 1000
    bleu_tokenizer: str = "13a"
    """sacrebleu's tokenizer: 13a, or zh, ja-mecab, ko-mecab, char, ... for such targets."""
    compared_by: TreeAxis | None = None
    """Where trees are compared: the setting that those of a group share."""


def build_options(config: EvalConfig) -> EvaluationOptions:
    """The options that the settings of `drafttrain eval` ask for."""
    return EvaluationOptions(
        sampling=build_sampling(config.decode.sampling),
        max_new_tokens=config.decode.sampling.max_new_tokens,
        seed=config.decode.sampling.seed,
        baselines=config.baselines,
        num_beams=config.num_beams,
        repeats=config.repeats,
        warmup=config.warmup,
        bootstrap=config.bootstrap,
        bleu_tokenizer=config.bleu_tokenizer,
        compared_by="nodes" if config.budget else "depth" if config.depth else None,
    )


@dataclass(frozen=True)
class Prompt:
    """One input row, tokenised."""

    row: int
    """Number of the row in the original file, from 0."""
    text: str
    reference: str | None
    source: Source


@dataclass(frozen=True)
class Skipped:
    """An input row that cannot be decoded."""

    row: int
    reason: str


@dataclass(frozen=True)
class Decoded:
    """What one method did with every prompt."""

    name: str
    kind: Literal["plain", "method", "baseline"]
    method: Method | None
    outputs: list[Output]
    """[P], each of the repeat that took the median time."""
    seconds: Array
    """[R, P], wall clock of each repeat and prompt."""

    @property
    def median_seconds(self) -> Array:
        """[P], medians over the repeats."""
        return np.median(self.seconds, axis=0)

    @property
    def lossless(self) -> bool:
        """Whether the output (or its law, when sampling) is the target's own by construction."""
        if self.kind == "method":
            return self.method is not None and self.method.verifier.lossless
        return not self.name.startswith(f"{GENERATE} beam")


@dataclass(frozen=True)
class Job:
    """A name and how to decode prompt number i."""

    name: str
    kind: Literal["plain", "method", "baseline"]
    decode: Callable[[int], Output]
    method: Method | None = None


def read_prompts(
    target: LoadedTarget, model: CachedModel, rows: Dataset
) -> tuple[list[Prompt], list[Skipped]]:
    """Tokenise the rows of `load_inputs`, texts or chats; those that do not fit are set aside.

    Raises ConfigError for chats without a template, ValueError where no row is left.
    """
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    decoder_only = not target.model.config.is_encoder_decoder
    tokenized = tokenize_prompts(target.tokenizer, rows, decoder_only)
    for row, ids in zip(rows, tokenized, strict=True):
        if not row["source"].strip() or not ids:
            skipped.append(Skipped(row["row"], "the source is empty"))
        elif model.source_limit is not None and len(ids) > model.source_limit:
            skipped.append(
                Skipped(
                    row["row"], f"{len(ids)} source tokens, the target takes {model.source_limit}"
                )
            )
        else:
            source = make_source(ids, target.model)
            prompts.append(Prompt(row["row"], row["source"], row["reference"], source))
    if not prompts:
        raise ValueError(
            f"none of the {len(skipped)} input rows can be decoded"
            + (f" (row {skipped[0].row}: {skipped[0].reason})" if skipped else "")
            + "; give data with at least one row"
        )
    return prompts, skipped


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
    return [
        Decoded(job.name, job.kind, job.method, [_median(repeats) for repeats in outputs], times)
        for job, outputs, times in zip(jobs, found, seconds, strict=True)
    ]


def make_jobs(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
) -> list[Job]:
    """Plain decoding first, then the methods, then the baselines."""
    plain = Method(NoDrafter(), FixedLength(1), build_verifier(AUTO, options.sampling))
    methods = [method for method in methods if method.drafter.name != NONE.name]
    names = [method.name for method in methods]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"methods of the same name: {', '.join(repeated)}; give each once")
    jobs = [Job(PLAIN, "plain", _engine(model, plain, prompts, options), plain)]
    for method in methods:
        check_pairing(method.drafter, method.stop, method.verifier, options.sampling)
        jobs.append(Job(method.name, "method", _engine(model, method, prompts, options), method))
    if "generate" in options.baselines:
        jobs.append(Job(GENERATE, "baseline", _generate(target, model, prompts, options, 1)))
    if "beam" in options.baselines:
        name = f"{GENERATE} beam {options.num_beams}"
        beam = _generate(target, model, prompts, options, options.num_beams)
        jobs.append(Job(name, "baseline", beam))
    return jobs


def top_two_gap(
    model: CachedModel, source: Source, tokens: Sequence[int], max_new_tokens: int
) -> float:
    """Gap between plain decoding's two highest logits at the token after `tokens`.

    Plain decoding is run again along `tokens`, one token a call, so that the logits are those
    that it saw. Small gaps are floating-point ties: other row shapes sum in another order.
    """
    limit = model.max_new_tokens(source, max_new_tokens)
    processors = TargetProcessors(model.model, Sampling()).start(source, limit)
    nothing = torch.empty(0, dtype=torch.long, device=source.prefix.device)
    committed = source.prefix
    state = model.encode(source)
    for token in [*tokens, None]:
        score = model.score([state], [committed], [Proposal.empty()])[0]
        if token is not None:
            model.keep(state, nothing)
            committed = torch.cat([committed, committed.new_tensor([token])])
    logits = processors(committed, nothing, score.logits)[0]
    first, second = logits.topk(2).values.tolist()
    return first - second


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


def _median(repeats: Sequence[Output]) -> Output:
    """The output that took the (lower) median time; all have the same tokens."""
    return sorted(repeats, key=lambda output: output.seconds)[(len(repeats) - 1) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cut_after_eos(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: position + 1]
    return tokens
