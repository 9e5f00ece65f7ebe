"""The target's outputs for a batch of inputs, by Transformers' `generate`.

Sampling turns a row's own uniform numbers into tokens, so that a row's output does not depend on
its batch, its shard or the number of processes. The prompts of decoder-only models are padded on
the left, so that all rows go on from the same column; masks and positions leave the padding out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, batches_by_length
from drafttrain.data.inputs.clips import given_outputs
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.padding import padded
from drafttrain.decoding.sampling import draw_tokens
from drafttrain.decoding.types import Source
from drafttrain.models.loading import LoadedTarget, cache_for_generate

WARPERS = {
    "temperature": (TemperatureLogitsWarper, 1.0),
    "top_k": (TopKLogitsWarper, 0),
    "top_p": (TopPLogitsWarper, 1.0),
    "min_p": (MinPLogitsWarper, 0.0),
}
"""Settings of sampling in order, and the values without effect."""


def decodes_alone(config: GenerationConfig) -> bool:
    """Whether logits processors look at the sources themselves, so that padding would count."""
    penalty, ngram = config.encoder_repetition_penalty, config.encoder_no_repeat_ngram_size
    return bool(ngram) or penalty not in (None, 1.0)


def needs_equal_lengths(model: PreTrainedModel) -> bool:
    """Whether logits processors would take the padding before a prompt for a part of the text."""
    config = model.generation_config
    read = [config.repetition_penalty not in (None, 1.0), config.no_repeat_ngram_size]
    read += [config.min_length, config.bad_words_ids, config.sequence_bias]
    return not model.config.is_encoder_decoder and any(read)


def open_generate(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """The backend `transformers`: batches of tokens, decoded by `generate`."""
    model, settings = target.model, generate_settings(config)
    budget = 1 if decodes_alone(model.generation_config) else config.batch_tokens

    def decode(rows: Sequence[ShardRow]) -> list[list[int] | None]:
        uniforms = None
        if config.method == "sample":
            seed, count = config.sampling.seed, config.sampling.max_new_tokens
            numbers = [np.random.default_rng((seed, row.row)).random(count) for row in rows]
            uniforms = torch.from_numpy(np.stack(numbers))
        clips = [row.source for row in rows if row.source is not None]
        if clips:
            return generate_clips(model, clips, settings, uniforms)
        return generate_batch(model, [row.source_ids for row in rows], settings, uniforms)

    return BatchDecoder(
        "transformers",
        decode,
        partial(batches_by_length, batch_tokens=budget, equal=needs_equal_lengths(model)),
        {"batch_tokens": config.batch_tokens},
    )


def generate_settings(config: DistillConfig) -> dict[str, Any]:
    """Arguments of `generate`; the rest is as in the target's generation_config."""
    sampled = config.method == "sample"
    sampling = config.sampling
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "max_length": None,
        "num_beams": config.num_beams if config.method == "beam" else 1,
        "do_sample": sampled,
        "temperature": sampling.temperature if sampled else None,
        "top_k": sampling.top_k if sampled else None,
        "top_p": sampling.top_p if sampled else None,
        "min_p": sampling.min_p if sampled else None,
        "num_return_sequences": 1,
        "return_dict_in_generate": False,
        "use_cache": True,
    } | ({} if config.method == "beam" else {"early_stopping": None, "length_penalty": None})


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    settings: dict[str, Any],
    uniforms: Tensor | None = None,
) -> list[list[int] | None]:
    """Tokens generated for each source, EOS included, no padding.

    Encoder-decoder models: those after the decoder start token; decoder-only ones: those after the
    prompt, which the sources are.

    settings: keyword arguments of `generate`. None stands for a row whose scores were not finite.
    Shapes: uniforms [B, max_new_tokens] in [0, 1), where settings say do_sample.
    """
    rows = [torch.tensor(source) for source in sources]
    pad = model.generation_config.pad_token_id or 0  # masked: any token will do
    side = "right" if model.config.is_encoder_decoder else "left"
    inputs, mask = (part.to(model.device) for part in padded(rows, pad, side))
    given = {"inputs": inputs, "attention_mask": mask, **cache_for_generate(model)}
    prefix = 1 if model.config.is_encoder_decoder else inputs.shape[1]
    return _generate(model, partial(model.generate, **given), prefix, settings, uniforms)


@torch.inference_mode()
def generate_clips(
    model: PreTrainedModel,
    sources: Sequence[Source],
    settings: dict[str, Any],
    uniforms: Tensor | None = None,
) -> list[list[int] | None]:
    """`generate_batch` for clips that have been encoded and whose prefixes are whole: tokens after
    them, EOS included.

    What a speech model's own `generate` does around Transformers' is done in the prefixes already.
    """
    prefixes = torch.stack([source.prefix for source in sources])
    given = {"decoder_input_ids": prefixes, "encoder_outputs": given_outputs(sources)}
    generate = partial(GenerationMixin.generate, model, **given)
    return _generate(model, generate, prefixes.shape[1], settings, uniforms)


def _generate(
    model: PreTrainedModel,
    generate: Callable[..., Tensor],
    prefix: int,
    settings: dict[str, Any],
    uniforms: Tensor | None,
) -> list[list[int] | None]:
    """Tokens after the first `prefix`; greedy decoding and sampling by `Choice`."""
    if settings["num_beams"] > 1:
        return trim(generate(**settings), model, prefix)
    warpers = []  # `choice` applies them, since `generate` would put them after it
    for name, (kind, neutral) in WARPERS.items() if settings["do_sample"] else ():
        if settings.get(name) not in (None, neutral):
            warpers.append(kind(settings[name]))
    choice = Choice(prefix, model.generation_config.eos_token_id, uniforms, warpers)
    greedy = settings | dict.fromkeys(WARPERS) | {"do_sample": False}
    sequences = generate(logits_processor=LogitsProcessorList([choice]), **greedy)
    rows = enumerate(trim(sequences, model, prefix))
    return [None if row in choice.broken else tokens for row, tokens in rows]


def trim(sequences: Tensor, model: PreTrainedModel, prefix: int = 1) -> list[list[int]]:
    """Drops the first `prefix` tokens and all that follows the first EOS after them.

    What `generate` appends to a finished row is padding, whichever token that is; a row without
    EOS was cut at the maximal length and has none. Shapes: [B, T].
    """
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    trimmed = []
    for tokens in sequences[:, prefix:].tolist():
        last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        trimmed.append(tokens[: last + 1])
    return trimmed


class Choice(LogitsProcessor):
    """The last of the logits processors: with uniform numbers it leaves one token of each row."""

    def __init__(
        self,
        prefix: int,
        ends: int | list[int],
        uniforms: Tensor | None,
        warpers: Sequence[LogitsProcessor],
    ) -> None:
        self._prefix, self._uniforms, self._warpers = prefix, uniforms, warpers
        self._ends = ends if isinstance(ends, list) else [ends]
        self.broken: set[int] = set()
        """Rows whose scores were not finite before they ended."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[:, self._prefix :]
        ended = torch.isin(new, torch.tensor(self._ends, device=new.device)).any(1)
        broken = ~scores.amax(dim=-1).isfinite() & ~ended
        self.broken.update(broken.nonzero().flatten().tolist())
        if self._uniforms is None:
            return scores
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        tokens = draw_tokens(scores.double().softmax(-1), self._uniforms[:, [new.shape[1]]])
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
