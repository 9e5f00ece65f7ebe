"""How a drafter that shares its target's encoder is checked: on made-up encodings and on noise."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, WhisperForCausalLM, WhisperForConditionalGeneration

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.speech import speech_source

CLIPS = 3
"""Clips of noise that are decoded: each costs the encoder 30 s of sound."""


def made_up_encoding(drafter: PreTrainedModel, ids: Tensor) -> Tensor:
    """What might come out of an encoder, the same for the same ids. Shapes: [T] -> [S, D]."""
    config = drafter.config
    generator = torch.Generator().manual_seed(int(ids.sum()))
    places = getattr(config, "max_source_positions", len(ids))
    width = getattr(config, "source_width", config.d_model)
    drawn = torch.randn(places, width, generator=generator)
    return drawn.to(drafter.device, drafter.dtype)


def made_up_states(drafter: PreTrainedModel, ids: Tensor) -> Tensor | None:
    """What a target might say along a text, where the drafter is fed that, the same for the same
    ids. Shapes: [T] -> [T, E]."""
    width = getattr(drafter.config, "state_width", None)
    if width is None:
        return None
    generator = torch.Generator().manual_seed(int(ids.sum()))
    return torch.randn(len(ids), width, generator=generator).to(drafter.device, drafter.dtype)


def gaps_on_noise(
    target: WhisperForConditionalGeneration, drafter: WhisperForCausalLM, max_new_tokens: int
) -> list[float | None]:
    """What Transformers' assisted generation makes of clips of noise, against the target alone.

    Of each clip the target's top-2 logit gap where the two part; None: they are equal. Without
    begin_suppress_tokens, which Transformers drops where there is an assistant.
    """
    target.generation_config.begin_suppress_tokens = None
    asked = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    found: list[float | None] = []
    for clip in range(CLIPS):
        features = noise(target, clip)
        plain, assisted = (
            target.generate(features, **asked, **settings)[0].tolist()
            for settings in ({}, {"assistant_model": drafter})
        )
        found.append(None if plain == assisted else _gap(target, features, plain, assisted))
    return found


def noise(target: PreTrainedModel, clip: int) -> Tensor:
    """Features of a clip, the same ones every time. Shapes: -> [1, M, F]."""
    config = target.config
    generator = torch.Generator().manual_seed(clip)
    shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.randn(shape, generator=generator).to(target.device, target.dtype)


@torch.inference_mode()
def _gap(
    target: WhisperForConditionalGeneration, features: Tensor, plain: list[int], assisted: list[int]
) -> float:
    """The target's top-2 logit gap where two outputs part, among the tokens that it may give."""
    end = target.generation_config.eos_token_id
    pairs = zip([*plain, end], [*assisted, end], strict=False)
    place = next(place for place, (one, other) in enumerate(pairs) if one != other)
    prefix = CachedModel(target).encode(speech_source(features[0], target)).source.prefix
    fed = torch.cat([prefix, prefix.new_tensor(plain[:place])])
    logits = target(features, decoder_input_ids=fed[None]).logits[0, -1].float()
    logits[target.generation_config.suppress_tokens or []] = -torch.inf
    best, second = logits.topk(2).values.tolist()
    return best - second
