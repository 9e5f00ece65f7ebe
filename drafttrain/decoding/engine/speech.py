"""Decoder prefix of Whisper models: that of their `generate`.

It has the start token, the language of the clip, the task and `<|notimestamps|>`, as far as the
generation_config names them. A language that it does not name is detected from the encoded clip.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.engine.architectures import device_of
from drafttrain.decoding.engine.sources import start_token
from drafttrain.decoding.types import Source
from drafttrain.models.speech import check_language_and_task

OPEN = -1
"""Stands for a language token that is not known before the clip is encoded."""


def speech_source(features: Tensor, model: PreTrainedModel) -> Source:
    """Returns a source from a clip's log-mel features [M, F], on the model's device. Raises as
    `read_start` does."""
    tokens = read_start(model.generation_config, model.config)
    device = device_of(model)
    prefix = torch.tensor([token for token in tokens if token != OPEN], device=device)
    inputs = {"input_features": features.to(device)}
    return Source(inputs, prefix, language_is_open=OPEN in tokens)


def read_start(settings: GenerationConfig, config: PretrainedConfig) -> list[int]:
    """Returns the prefix that `generate` gives the decoder, with OPEN for an open language.

    Raises ValueError for a language or task that the model does not know, for either of them if the
    model is English-only, and for forced tokens with gaps.
    """
    settings = copy.copy(settings)
    check_language_and_task(settings)
    settings.decoder_start_token_id, settings.return_timestamps = start_token(settings), False
    without_clip = SimpleNamespace(device="cpu", detect_language=lambda **_: torch.tensor([OPEN]))
    [tokens] = WhisperForConditionalGeneration._retrieve_init_tokens(
        without_clip, None, 1, settings, config, None, {}
    ).tolist()
    return tokens


@torch.inference_mode()
def detect_languages(
    model: PreTrainedModel, sources: Sequence[Source], encoded: Sequence[Tensor]
) -> list[Source]:
    """Completes the prefixes of sources: the model detects open languages, as its `generate` does,
    in one decoder call. Shapes: encoded [S, D] each, of equal lengths."""
    named, indices = list(sources), [i for i, one in enumerate(sources) if one.language_is_open]
    if not indices:
        return named
    states = BaseModelOutput(torch.stack([encoded[index] for index in indices]))
    for index, language in zip(indices, model.detect_language(encoder_outputs=states), strict=True):
        prefix = sources[index].prefix
        prefix = torch.cat([prefix[:1], language.view(1), prefix[1:]])
        named[index] = replace(sources[index], prefix=prefix, language_is_open=False)
    return named
