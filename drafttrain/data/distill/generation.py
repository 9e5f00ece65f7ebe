"""The backend `transformers`: decodes batches of inputs with Transformers' `generate`.

Sampling uses uniform random numbers that belong to the row, so a row's output does not depend on
its batch, its shard or the number of processes. Prompts of decoder-only models are left-padded, so
all rows continue at the same column; attention masks and positions exclude the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, Decoded, batches_by_length, sampling_of
from drafttrain.data.inputs.clips import given_outputs
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.padding import cut_after_eos, end_tokens, padded
from drafttrain.decoding.sampling import draw_tokens, warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.loading import LoadedTarget, cache_for_generate


@dataclass(frozen=True)
class Draws:
    """Sampling settings and the uniform random numbers that tokens are drawn with."""

    sampling: Sampling
    uniforms: Tensor
    """[B, max_new_tokens] in [0, 1)"""


def needs_equal_lengths(model: PreTrainedModel) -> bool:
    """Whether logits processors would treat the left padding of a prompt as text."""
    config = model.generation_config
    read = [config.repetition_penalty not in (None, 1.0), config.no_repeat_ngram_size]
    read += [config.min_length, config.bad_words_ids, config.sequence_bias]
    return not model.config.is_encoder_decoder and any(read)


def open_generate(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """Opens the backend `transformers`, with batches by token budget."""
    model, settings, budget = target.model, generate_settings(config), config.batch_tokens
    own = model.generation_config
    if own.encoder_no_repeat_ngram_size or own.encoder_repetition_penalty not in (None, 1.0):
        budget = 1  # logits processors read the sources: padding would change the result

    def decode(rows: Sequence[ShardRow]) -> Iterable[tuple[int, Decoded]]:
        draws, chosen = None, config.sampling
        if config.method == "sample":
            seed, count = chosen.seed, chosen.max_new_tokens
            numbers = [np.random.default_rng((seed, row.row)).random(count) for row in rows]
            draws = Draws(sampling_of(config), torch.from_numpy(np.stack(numbers)))
        clips = [row.source for row in rows if row.source is not None]
        if clips:
            return enumerate(generate_clips(model, clips, settings, draws))
        texts = [row.source_ids for row in rows]
        return enumerate(generate_batch(model, texts, settings, draws))

    return BatchDecoder(
        "transformers",
        decode,
        partial(batches_by_length, batch_tokens=budget, equal=needs_equal_lengths(model)),
    )


def generate_settings(config: DistillConfig) -> dict[str, Any]:
    """Returns the arguments of `generate`, always with do_sample=False (`TokenChoice` samples); all
    others come from the target's generation_config."""
    return {
        "max_new_tokens": config.sampling.max_new_tokens,
        "max_length": None,
        "num_beams": config.num_beams if config.method == "beam" else 1,
        "do_sample": False,
        **dict.fromkeys(("temperature", "top_k", "top_p", "min_p")),
        "num_return_sequences": 1,
        "return_dict_in_generate": False,
        "use_cache": True,
    } | ({} if config.method == "beam" else {"early_stopping": None, "length_penalty": None})


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    settings: dict[str, Any],
    draws: Draws | None = None,
) -> list[list[int] | None]:
    """Generates tokens for each source; returns them with EOS, without padding.

    Encoder-decoder models: the tokens after the decoder start token; decoder-only models: the
    tokens after the prompt, which is the source. None for a row whose logits were not finite.

    settings: keyword arguments of `generate`, without sampling.
    """
    rows = [torch.tensor(source) for source in sources]
    pad = model.generation_config.pad_token_id or 0  # masked: the token does not matter
    side = "right" if model.config.is_encoder_decoder else "left"
    inputs, mask = (part.to(model.device) for part in padded(rows, pad, side))
    given = {"inputs": inputs, "attention_mask": mask, **cache_for_generate(model)}
    prefix = 1 if model.config.is_encoder_decoder else inputs.shape[1]
    return _generate(model, partial(model.generate, **given), prefix, settings, draws)


@torch.inference_mode()
def generate_clips(
    model: PreTrainedModel,
    sources: Sequence[Source],
    settings: dict[str, Any],
    draws: Draws | None = None,
) -> list[list[int] | None]:
    """Generates as `generate_batch`, for encoded clips with complete prefixes; returns the tokens
    after the prefix, EOS included.

    Calls `GenerationMixin.generate`: the prefixes replace what a speech model's `generate` adds.
    """
    prefixes = torch.stack([source.prefix for source in sources])
    given = {"decoder_input_ids": prefixes, "encoder_outputs": given_outputs(sources)}
    generate = partial(GenerationMixin.generate, model, **given)
    return _generate(model, generate, prefixes.shape[1], settings, draws)


def _generate(
    model: PreTrainedModel,
    generate: Callable[..., Tensor],
    prefix: int,
    settings: dict[str, Any],
    draws: Draws | None,
) -> list[list[int] | None]:
    """Returns the tokens after the first `prefix`; `TokenChoice` samples, finds non-finite rows."""
    if settings["num_beams"] > 1:
        return trim(generate(**settings), model, prefix)
    choice = TokenChoice(prefix, end_tokens(model.generation_config), draws)
    sequences = generate(logits_processor=LogitsProcessorList([choice]), **settings)
    rows = enumerate(trim(sequences, model, prefix))
    return [None if row in choice.broken else tokens for row, tokens in rows]


def trim(sequences: Tensor, model: PreTrainedModel, prefix: int = 1) -> list[list[int]]:
    """Drops the first `prefix` tokens and everything after the first EOS that follows them.

    After EOS, `generate` appends only padding, whatever token that is. A row without EOS was cut
    at the maximal length and has no padding. Shapes: [B, T].
    """
    ends = end_tokens(model.generation_config)
    return [cut_after_eos(tokens, ends) for tokens in sequences[:, prefix:].tolist()]


class TokenChoice(LogitsProcessor):
    """The last logits processor; when sampling, it draws a token and excludes all others."""

    def __init__(self, prefix: int, ends: Sequence[int], draws: Draws | None) -> None:
        self._prefix, self._ends, self._draws = prefix, ends, draws
        self.broken: set[int] = set()
        """Batch rows whose logits were not finite before EOS."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[:, self._prefix :]
        ended = torch.isin(new, torch.tensor(self._ends, device=new.device)).any(1)
        broken = ~scores.amax(dim=-1).isfinite() & ~ended
        self.broken.update(broken.nonzero().flatten().tolist())
        if self._draws is None:
            return scores
        probs = warp(scores, self._draws.sampling)
        tokens = draw_tokens(probs, self._draws.uniforms[:, [new.shape[1]]])
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
