"""Interleaved decoding of the same inputs with every method and baseline.

Timings on a shared machine drift. Every input is therefore decoded by all methods in turn,
including plain decoding and Transformers' `generate`, in an order that rotates from input to input.
This is repeated, and medians over the repeats are taken per input. With batches, the unit is a
group of consecutive inputs. Tokenisation is not timed; encoding is.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from drafttrain.build.method import AUTO, Method, build_verifier
from drafttrain.build.pairs import Pair
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.kinds import NONE
from drafttrain.config.progress import tracking
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.architectures import WHISPER_LIKE
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.padding import cut_after_eos, padded
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.prompts import Prompt
from drafttrain.models.loading import cache_for_generate

RESERVED = PLAIN, GENERATE, BEAM, ASSISTED = "plain", "generate", "beam", "assisted"
BEAMS = 5
"""Number of beams of beam search."""
GROUP_BATCHES = 4
"""Minimal size of a group in batches."""


@dataclass(frozen=True)
class Job:
    """A method or a baseline, ready to decode."""

    name: str
    way: str
    """The method without sizes, as `Run.method`: plain, chain, rsd-s, ..., generate, beam or
    assisted."""
    decode: Callable[[Sequence[Prompt], int], list[Output]]
    """(prompts, batch size) -> outputs. In a batch `Output.seconds` is the time from when the
    sequence entered until it ended; at batch size 1 `run_interleaved` sets it."""
    method: Method | None = None
    """None: a baseline of Transformers."""

    @property
    def kind(self) -> Literal["plain", "method", "baseline"]:
        if self.method is None:
            return "baseline"
        return "plain" if self.way == PLAIN else "method"

    @property
    def lossless(self) -> bool:
        """Whether the output (when sampling: its distribution) is exactly the target's."""
        return self.way != BEAM if self.method is None else self.method.verifier.lossless


@dataclass(frozen=True)
class Decoded:
    """Outputs and times of one job for all prompts at a batch size."""

    job: Job
    batch_size: int
    outputs: list[Output]
    """[P], each from the repeat with the (lower) median time; all repeats give the same tokens."""
    seconds: Array
    """[R, P] wall-clock time of each repeat and prompt, from when its sequence entered to its
    end."""
    cost_seconds: Array
    """[P] each prompt's share of wall-clock time, for throughput. The median time of every group is
    divided among its sequences in proportion to their shares of the batched calls."""
    memory_bytes: int | None = None
    """Peak memory of a group, if measured."""

    @property
    def median_seconds(self) -> Array:
        """[P] latency: medians over the repeats."""
        return np.median(self.seconds, axis=0)

    @property
    def token_counts(self) -> Array:
        """[P] number of tokens of each output."""
        return np.array([float(len(output.tokens)) for output in self.outputs])


class DecodingInterrupted(KeyboardInterrupt):
    """Ctrl-C during decoding. Carries what every job had decoded: the first prompts once, or all
    prompts in fewer repeats."""

    def __init__(self, decoded: list[Decoded]) -> None:
        self.decoded = decoded


def run_interleaved(
    jobs: Sequence[Job],
    prompts: Sequence[Prompt],
    settings: EvalConfig,
    device: torch.device,
    progress: bool = False,
    batch_size: int = 1,
) -> list[Decoded]:
    """Decodes the prompts with every job, interleaved, and returns the results in job order.

    All jobs must support the batch size. Uses `repeats` and `warmup` of the settings. Raises
    DecodingInterrupted on Ctrl-C, or KeyboardInterrupt if no group was complete.
    """
    groups = make_groups(len(prompts), batch_size)
    chosen = [[prompts[index] for index in group] for group in groups]
    for group in chosen[: settings.warmup if batch_size == 1 else min(settings.warmup, 1)]:
        for job in jobs:
            job.decode(group, batch_size)
    group_seconds = np.zeros((len(jobs), settings.repeats, len(groups)))
    outputs_of: list[list[list[Output]]] = [[[] for _ in prompts] for _ in jobs]
    what = "decode" if batch_size == 1 else f"decode, batch {batch_size}"
    done = 0
    try:
        with tracking(settings.repeats * len(prompts), what, "input", shown=progress) as work:
            for repeat, (index, group) in product(range(settings.repeats), enumerate(groups)):
                for turn in range(len(jobs)):
                    job = (turn + index + repeat) % len(jobs)
                    outputs, seconds = _timed(jobs[job], chosen[index], batch_size, device)
                    group_seconds[job, repeat, index] = seconds
                    for prompt, output in zip(group, outputs, strict=True):
                        outputs_of[job][prompt].append(output)
                work.update(len(group))
                done += 1
    except KeyboardInterrupt:
        if done == 0:
            raise
        times = group_seconds[:, : max(1, done // len(groups)), :done]
        account = _account(jobs, batch_size, groups[:done], times, outputs_of)
        raise DecodingInterrupted(account) from None
    return _account(jobs, batch_size, groups, group_seconds, outputs_of)


def _account(
    jobs: Sequence[Job],
    batch_size: int,
    groups: Sequence[Sequence[int]],
    group_seconds: Array,
    outputs_of: Sequence[Sequence[Sequence[Output]]],
) -> list[Decoded]:
    """Divides group times among the prompts and selects their outputs.

    group_seconds: [J, R, G]. outputs_of: by job, prompt and repeat, at least R repeats.
    """
    decoded, prompts, repeats = [], sum(map(len, groups)), group_seconds.shape[1]
    medians = np.median(group_seconds, axis=1)
    for job, times, by_prompt in zip(jobs, medians, outputs_of, strict=True):
        outputs = [repeated[:repeats] for repeated in by_prompt[:prompts]]
        work_done = np.array([np.mean(list(map(work_seconds, repeated))) for repeated in outputs])
        costs = np.zeros(prompts)
        for group, seconds in zip(groups, times, strict=True):
            total = work_done[group].sum()
            costs[group] = seconds * (work_done[group] / total if total > 0 else 1.0 / len(group))
        took = np.array([[one.seconds for one in repeated] for repeated in outputs]).T
        ordered = [sorted(repeated, key=lambda one: one.seconds) for repeated in outputs]
        middle = [repeated[(repeats - 1) // 2] for repeated in ordered]
        decoded.append(Decoded(job, batch_size, middle, took, costs))
    return decoded


def make_groups(prompts: int, batch_size: int) -> list[list[int]]:
    """Divides prompts into consecutive groups: single prompts at batch size 1; else groups of
    nearly equal size, at least `GROUP_BATCHES` times the batch size, or one group of all."""
    if batch_size == 1:
        return [[prompt] for prompt in range(prompts)]
    groups = max(1, prompts // (GROUP_BATCHES * batch_size))
    return [part.tolist() for part in np.array_split(np.arange(prompts), groups)]


def work_seconds(output: Output) -> float:
    """Returns a sequence's share of batched calls, summed over its rounds; without rounds, its
    total time."""
    rounds = sum(round.draft_seconds + round.target_seconds for round in output.rounds)
    return rounds if output.rounds else output.seconds


def _timed(
    job: Job, group: Sequence[Prompt], batch_size: int, device: torch.device
) -> tuple[list[Output], float]:
    """Decodes a group and returns its outputs and wall-clock time, including pending GPU work."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    began = perf_counter()
    outputs = job.decode(group, batch_size)
    wait(device)
    seconds = perf_counter() - began
    if batch_size == 1:
        outputs[0].seconds = seconds
    return outputs, seconds


def make_jobs(pair: Pair, methods: Sequence[Method], settings: EvalConfig) -> list[Job]:
    """Returns plain decoding, then the methods, then the baselines.

    Raises ValueError if two methods have the same name.
    """
    sampling = settings.decode.sampling
    methods = [method for method in methods if method.drafter.name != NONE.name]
    names = [method.name for method in methods]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"methods of the same name: {', '.join(repeated)}; give each once")
    jobs = []
    for method in (plain_method(sampling), *methods):
        decode = partial(decode_by, pair.model, method, sampling)
        jobs.append(Job(method.name, method.kind, decode, method))
    return jobs + baseline_jobs(pair, methods, settings)


def plain_method(sampling: SamplingConfig) -> Method:
    """Returns plain decoding in this engine."""
    verifier = build_verifier(AUTO, Sampling.of(sampling))
    return Method(NoDrafter(), FixedLength(1), verifier, label=PLAIN, kind=PLAIN)


def decode_by(
    model: CachedModel,
    method: Method,
    sampling: SamplingConfig,
    prompts: Sequence[Prompt],
    batch_size: int = 1,
) -> list[Output]:
    """Decodes prompts with a method in this engine."""
    rows, sources = [one.row for one in prompts], [one.source for one in prompts]
    decoder = method.decoder(model, Sampling.of(sampling), sampling.seed, rows.__getitem__)
    return decoder.decode_all(sources, sampling.max_new_tokens, batch_size)


def baseline_jobs(pair: Pair, methods: Sequence[Method], settings: EvalConfig) -> list[Job]:
    """Returns the requested baselines, which are decoding methods of Transformers.

    `assisted` uses the methods' language models as assistants, one job per model and draft length.
    It decodes one sequence at a time and ignores a speech target's begin_suppress_tokens, which is
    stated in the job's name.
    """
    sampling, model, jobs = settings.decode.sampling, pair.target.model, []

    def add(name: str, way: str, **how: Any) -> None:
        jobs.append(Job(name, way, partial(generate_by, pair, sampling, how)))

    if GENERATE in settings.baselines:
        add(GENERATE, GENERATE)
    if BEAM in settings.baselines:
        add(f"{GENERATE} beam {BEAMS}", BEAM, num_beams=BEAMS)
    begins = model.generation_config.begin_suppress_tokens
    dropped = ", no begin_suppress_tokens" if begins and isinstance(model, WHISPER_LIKE) else ""
    assisted: set[tuple[int, int]] = set()
    for method in methods if ASSISTED in settings.baselines else ():
        key = id(method.assistant), method.stop.longest
        if method.assistant is not None and key not in assisted:
            assisted.add(key)
            drafter = method.other or method.label or method.called or method.drafter.name
            name = f"{ASSISTED} {drafter} k={key[1]}, constant, confidence 0{dropped}"
            add(name, ASSISTED, assistant_model=steady_assistant(method.assistant, key[1]))
    return jobs


def steady_assistant(model: PreTrainedModel, k: int) -> PreTrainedModel:
    """Returns a copy that shares the weights and has a generation_config with which assisted
    generation drafts k tokens in every round."""
    assistant = copy.copy(model)
    assistant.generation_config = copy.deepcopy(model.generation_config)
    assistant.generation_config.update(
        num_assistant_tokens=k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return assistant


@torch.inference_mode()
def generate_by(
    pair: Pair,
    sampling: SamplingConfig,
    how: dict[str, Any],
    prompts: Sequence[Prompt],
    batch_size: int = 1,
) -> list[Output]:
    """Decodes prompts with Transformers' `generate` in padded batches of consecutive prompts.

    Every sequence's time is that of its batch. Within a batch, prompts with fewer positions left
    are generated separately. how: more arguments of `generate`, for example num_beams.
    """
    outputs, wanted = [], sampling.max_new_tokens
    for start in range(0, len(prompts), batch_size):
        batch, began = prompts[start : start + batch_size], perf_counter()
        limits = [pair.model.max_new_tokens(prompt.source, wanted) for prompt in batch]
        tokens_of: dict[int, list[int]] = {}
        for limit in sorted(set(limits)):
            rows = [row for row, one in enumerate(limits) if one == limit]
            generated = _generate(pair, sampling, how, [batch[row] for row in rows], limit)
            tokens_of |= zip(rows, generated, strict=True)
        seconds = perf_counter() - began
        cut = [cut_after_eos(tokens_of[row], pair.model.eos_ids) for row in range(len(batch))]
        outputs += [Output(tokens=tokens, seconds=seconds) for tokens in cut]
    return outputs


def _generate(
    pair: Pair, sampling: SamplingConfig, how: dict[str, Any], batch: Sequence[Prompt], limit: int
) -> list[list[int]]:
    """Generates with one padded batch and returns the new tokens."""
    target, first = pair.target.model, 0
    given = {"num_beams": 1, "max_new_tokens": limit, "max_length": None, **how}  # else a warning
    given["num_return_sequences"] = 1
    given["do_sample"] = given["num_beams"] == 1 and sampling.temperature > 0.0
    if given["do_sample"]:
        given |= asdict(Sampling.of(sampling))
    audio = isinstance(target, WHISPER_LIKE)
    if audio:
        features = torch.stack([prompt.source.inputs["input_features"] for prompt in batch])
        given["input_features"] = features.to(target.dtype)
    else:
        decoder_only = not pair.model.is_encoder_decoder
        given["inputs"], given["attention_mask"] = padded(
            [prompt.source.input_ids for prompt in batch],
            target.generation_config.pad_token_id or 0,  # masked, so any token is allowed
            "left" if decoder_only else "right",
        )
        given |= cache_for_generate(target)
        first = given["inputs"].shape[1] if decoder_only else len(batch[0].source.prefix)
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=given["do_sample"]):
        if given["do_sample"]:
            torch.manual_seed(sampling.seed + batch[0].row)
        generated = target.generate(**given)[:, first:].tolist()
    if audio:  # returned without EOS; added to outputs shorter than the limit
        [end] = pair.model.eos_ids
        return [[*tokens, end][:limit] for tokens in generated]
    return generated
