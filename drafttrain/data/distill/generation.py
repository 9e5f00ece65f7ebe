"""The target's outputs for a batch of inputs, finished rows leaving the batch.

Transformers' `generate` prepares everything (encoder, cache, positions, logits processors, stopping
criteria). Beam search is its own; greedy decoding and sampling run the loop below, because
`generate` carries finished rows along to the end of a batch. Sampling turns a row's own uniform
numbers into tokens, so that a row's output does not depend on its batch, its shard or the number
of processes. The prompts of decoder-only models are padded on the left, so that all rows go on
from the same column; masks and positions leave the padding out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.config.backends import TRANSFORMERS
from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, batches_by_length
from drafttrain.data.inputs.hearing import given_outputs
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.padding import padded
from drafttrain.decoding.types import Source
from drafttrain.models.loading import LoadedTarget, cache_for_generate

LEAVE_SHARE = 0.25
"""Finished rows leave once they are this share of the batch; a gather copies the whole cache."""


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
    """The backend `transformers`: batches of tokens, decoded by the loop below or by beams."""
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
        TRANSFORMERS.name,
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
    settings = settings | cache_for_generate(model)
    if settings["num_beams"] > 1:
        sequences = model.generate(inputs, attention_mask=mask, **settings)
        return trim(sequences, model, 1 if model.config.is_encoder_decoder else inputs.shape[1])
    return model.generate(
        inputs, attention_mask=mask, custom_generate=_decode, uniforms=uniforms, **settings
    )


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
    given = {"decoder_input_ids": prefixes, "encoder_outputs": given_outputs(sources), **settings}
    generate = partial(GenerationMixin.generate, model, **given)
    if settings["num_beams"] > 1:
        return trim(generate(), model, prefixes.shape[1])
    return generate(custom_generate=_decode, uniforms=uniforms)


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


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    uniforms: Tensor | None = None,
    **prepared: Any,
) -> list[list[int] | None]:
    """Greedy decoding or sampling, called by `generate` (custom_generate) with all prepared.

    A parameter named here is taken out of what `generate` itself sees, so the mask is not one.
    """
    tokens = input_ids
    prefix = fed = tokens.shape[1]
    rows = torch.arange(len(tokens), device=tokens.device)
    going = torch.ones_like(rows, dtype=torch.bool)
    outputs: list[list[int] | None] = [None] * len(rows)
    while True:
        inputs = model.prepare_inputs_for_generation(
            tokens, next_sequence_length=fed, is_first_iteration=fed == prefix, **prepared
        )
        logits = model(**inputs).logits[:, -1]
        fed = 1
        scores = logits_processor(tokens, logits.float())
        finite = scores.amax(dim=-1).isfinite()
        step = tokens.shape[1] - prefix
        drawn = None if uniforms is None else uniforms[rows.cpu(), step].to(scores.device)
        tokens = torch.cat([tokens, choose(scores, drawn)[:, None]], dim=-1)
        ended = going & stopping_criteria(tokens, scores)
        for row in (ended & finite).nonzero().flatten().tolist():
            outputs[rows[row]] = tokens[row, prefix:].tolist()
        going &= finite & ~ended
        left = int(going.sum())
        if left == 0:
            return outputs
        _append_column(prepared, model.config.is_encoder_decoder)
        if left <= (1 - LEAVE_SHARE) * len(rows):
            keep = going.nonzero().flatten()
            rows, tokens, going = rows[keep], tokens[keep], going[keep]
            _keep_rows(prepared, keep)


def _append_column(prepared: dict[str, Any], is_encoder_decoder: bool) -> None:
    """Masks and positions of one more token, for the side that is decoded."""
    side = "decoder_" if is_encoder_decoder else ""
    mask = prepared.get(f"{side}attention_mask")  # none where nothing is padded
    if mask is not None:
        prepared[f"{side}attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
    positions = prepared.get(f"{side}position_ids")
    if positions is not None:
        prepared[f"{side}position_ids"] = torch.cat([positions, positions[:, -1:] + 1], dim=-1)


def _keep_rows(prepared: dict[str, Any], keep: Tensor) -> None:
    """All other rows leave: cache, masks, positions and encoder states."""
    prepared["past_key_values"].batch_select_indices(keep)
    for side in ("", "decoder_"):
        for name in (f"{side}attention_mask", f"{side}position_ids"):
            if prepared.get(name) is not None:
                prepared[name] = prepared[name][keep]
    if "encoder_outputs" in prepared:
        hidden = prepared["encoder_outputs"].last_hidden_state[keep]
        prepared["encoder_outputs"] = BaseModelOutput(last_hidden_state=hidden)


def choose(scores: Tensor, uniforms: Tensor | None) -> Tensor:
    """The most likely token, or the token at a uniform number's place in the distribution.

    Shapes: scores [R, V], uniforms [R] in [0, 1) or None -> [R].
    """
    if uniforms is None:
        return scores.argmax(dim=-1)
    mass = scores.double().softmax(dim=-1).cumsum(dim=-1)
    places = uniforms[:, None] * mass[:, -1:]
    tokens = torch.searchsorted(mass, places, right=True)
    return tokens.clamp(max=scores.shape[-1] - 1).squeeze(-1)
