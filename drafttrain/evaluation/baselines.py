"""Transformers' own ways to decode, which users would take instead: jobs beside our methods'."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.build.method import Method
from drafttrain.decoding.engine.architectures import WHISPER_LIKE
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.padding import padded
from drafttrain.decoding.types import Output
from drafttrain.evaluation.prompts import ASSISTED, BEAM, GENERATE, EvaluationOptions, Job, Prompt
from drafttrain.models.loading import LoadedTarget, cache_for_generate


def transformers_jobs(
    target: LoadedTarget,
    model: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
) -> list[Job]:
    """The baselines asked for that are Transformers' own.

    `assisted` drafts with the language models that the methods draft with, a job for each of them
    and each draft length. Raises ValueError where it is asked for and no method has one.
    """
    base = Generate(target.model, model, prompts, options)
    jobs = []
    if GENERATE in options.baselines:
        jobs.append(Job(GENERATE, GENERATE, base.decode))
    if BEAM in options.baselines:
        beams = options.num_beams
        search = Generate(target.model, model, prompts, options, {"num_beams": beams})
        jobs.append(Job(f"{GENERATE} beam {beams}", BEAM, search.decode, sizes={"beams": beams}))
    if ASSISTED in options.baselines:
        jobs += _assisted_jobs(base, methods)
    return jobs


def _assisted_jobs(base: Generate, methods: Sequence[Method]) -> list[Job]:
    """Transformers' assisted generation, which takes one sequence at a time, and drops a speech
    target's begin_suppress_tokens: the job's name says so."""
    dropped = ""
    if (
        isinstance(base.target, WHISPER_LIKE)
        and base.target.generation_config.begin_suppress_tokens
    ):
        dropped = ", no begin_suppress_tokens"
    jobs: dict[tuple[int, int], Job] = {}
    for method in methods:
        if method.assistant is None:
            continue
        k, name = method.stop.longest, method.label or method.drafter.name
        own = Generate(
            base.target,
            base.model,
            base.prompts,
            base.options,
            {"assistant_model": steady_assistant(method.assistant, k)},
        )
        jobs.setdefault(
            (id(method.assistant), k),
            Job(
                f"{ASSISTED} {name} k={k}, constant, confidence 0{dropped}",
                ASSISTED,
                own.decode,
                sizes={"k": k},
                largest_batch=1,
            ),
        )
    if not jobs:
        raise ValueError(
            f"baselines has {ASSISTED!r}, but no method drafts with a language model; give one as "
            f"the drafter or among others, or leave {ASSISTED!r} out"
        )
    return list(jobs.values())


def steady_assistant(model: PreTrainedModel, k: int) -> PreTrainedModel:
    """The same model, for assisted generation with k tokens a round, whatever it has seen.

    Transformers reads draft length, schedule and confidence threshold from the assistant's own
    settings. The weights are shared, and the model given keeps its settings.
    """
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
        how = {"do_sample": False, "num_beams": 1, **self.settings}
        sampling = self.options.sampling
        if how["num_beams"] == 1 and not sampling.greedy:
            how |= {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices, enabled=bool(how["do_sample"])):
            if how["do_sample"]:
                torch.manual_seed(self.options.seed + batch[0].row)
            return self.target.generate(
                **inputs,
                max_new_tokens=limit,
                max_length=None,  # the target's own would only be warned about
                **how,
            )


def cut_after_eos(tokens: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first EOS, which is kept."""
    for position, token in enumerate(tokens):
        if token in eos_ids:
            return list(tokens[: position + 1])
    return list(tokens)
