"""The backend `transformers`: decodes batches of inputs with Transformers' `generate`.

Sampling uses uniform random numbers that belong to the row, so a row's output does not depend on
its batch, its shard or the number of processes. Prompts of decoder-only models are left-padded, so
all rows continue at the same column; attention masks and positions exclude the padding.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, Decoded, batches_by_length, sampling_of
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.engine.encoding import given_encoding
from drafttrain.decoding.padding import cut_after_eos, end_tokens, padded
from drafttrain.decoding.sampling import draw_tokens, warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.loading import LoadedTarget, cache_for_generate


class Draws(NamedTuple):
    """Sampling settings, and uniform random numbers [B, max_new_tokens] that draw the tokens."""

    sampling: Sampling
    uniforms: Tensor


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
        sources = [row.source or row.source_ids for row in rows]
        return enumerate(generate_batch(model, sources, settings, draws))

    equal = needs_equal_lengths(model)
    batches = partial(batches_by_length, batch_tokens=budget, equal=equal)
    return BatchDecoder("transformers", decode, batches)


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
    sources: Sequence[Sequence[int] | Source],
    settings: dict[str, Any],
    draws: Draws | None = None,
) -> list[list[int] | None]:
    """Generates tokens for each source; returns them with EOS, without padding.

    sources: token ids, or encoded clips with complete prefixes. Returns the tokens after the
    decoder start token, after the prompt of a decoder-only model, or after the prefix of a clip;
    None for a row whose logits were not finite. settings: keyword arguments of `generate`, without
    sampling.
    """
    generate = model.generate
    if isinstance(sources[0], Source):
        # the prefixes replace what a speech model's own `generate` adds
        generate = partial(GenerationMixin.generate, model)
        prefixes = torch.stack([source.prefix for source in sources])
        states = BaseModelOutput(last_hidden_state=torch.stack(given_encoding(sources)))
        given = {"decoder_input_ids": prefixes, "encoder_outputs": states}
        prefix = prefixes.shape[1]
    else:
        rows = [torch.tensor(source) for source in sources]
        pad = model.generation_config.pad_token_id or 0  # masked: the token does not matter
        side = "right" if model.config.is_encoder_decoder else "left"
        inputs, mask = (part.to(model.device) for part in padded(rows, pad, side))
        given = {"inputs": inputs, "attention_mask": mask, **cache_for_generate(model)}
        prefix = 1 if model.config.is_encoder_decoder else inputs.shape[1]
    if settings["num_beams"] > 1:
        return trim(generate(**given, **settings), model, prefix)
    choice = TokenChoice(prefix, end_tokens(model.generation_config), draws)
    sequences = generate(**given, logits_processor=LogitsProcessorList([choice]), **settings)
    outputs = enumerate(trim(sequences, model, prefix))
    return [None if row in choice.broken else tokens for row, tokens in outputs]


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
