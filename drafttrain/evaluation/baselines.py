"""Transformers' own ways to decode, which users would take instead: jobs beside our methods'."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
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
    and each draft length. It takes one sequence at a time, and drops a speech target's
    begin_suppress_tokens: the job's name says so. Raises ValueError where no method has one.
    """

    def job(name: str, way: str, largest_batch: int | None = None, **how: Any) -> Job:
        own = Generate(target.model, model, prompts, options, how)
        sizes = {"beams": how["num_beams"]} if "num_beams" in how else {}
        return Job(name, way, own.decode, sizes=sizes, largest_batch=largest_batch)

    jobs = []
    if GENERATE in options.baselines:
        jobs.append(job(GENERATE, GENERATE))
    if BEAM in options.baselines:
        jobs.append(job(f"{GENERATE} beam {options.num_beams}", BEAM, num_beams=options.num_beams))
    if ASSISTED not in options.baselines:
        return jobs
    begins = target.model.generation_config.begin_suppress_tokens
    dropped = ", no begin_suppress_tokens" if begins and _hears(target.model) else ""
    assisted: dict[tuple[int, int], Job] = {}
    for method in methods:
        key = id(method.assistant), method.stop.longest
        if method.assistant is not None and key not in assisted:
            k, drafter = method.stop.longest, method.label or method.drafter.name
            name = f"{ASSISTED} {drafter} k={k}, constant, confidence 0{dropped}"
            found = job(name, ASSISTED, 1, assistant_model=steady_assistant(method.assistant, k))
            assisted[key] = replace(found, sizes={"k": k})
    if not assisted:
        raise ValueError(
            f"baselines has {ASSISTED!r}, but no method drafts with a language model; give one as "
            f"the drafter or among others, or leave {ASSISTED!r} out"
        )
    return [*jobs, *assisted.values()]


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


def _hears(model: PreTrainedModel) -> bool:
    return isinstance(model, WHISPER_LIKE)


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
        if _hears(self.target):
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
