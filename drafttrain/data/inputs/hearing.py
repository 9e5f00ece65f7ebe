"""Clips -> sources: what a speech target's processor makes of a recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.data.inputs.clips import RATE, read_speech
from drafttrain.decoding.engine.encoding import given_encoding
from drafttrain.decoding.engine.speech import speech_source
from drafttrain.decoding.types import Source
from drafttrain.models.loading import LoadedTarget


def hear(target: LoadedTarget, row: Mapping[str, Any]) -> Source:
    """The log-mel features of a row of `as_clips`, and what the decoder starts from.

    Raises ConfigError for a clip that cannot be used any more.
    """
    assert target.processor is not None
    found = target.processor.feature_extractor(
        read_speech(row), sampling_rate=RATE, return_tensors="pt"
    )
    return speech_source(found["input_features"][0], target.model)


class HeardRows(Sequence[Source]):
    """The sources of rows, each made when it is asked for: features take 1 MB a clip."""

    def __init__(self, target: LoadedTarget, rows: datasets.Dataset) -> None:
        self._target, self._rows = target, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Source:
        return hear(self._target, self._rows[place])


def given_outputs(sources: Sequence[Source]) -> BaseModelOutput:
    """What the encoder made of sources that hold it, as Transformers takes it."""
    return BaseModelOutput(last_hidden_state=torch.stack(given_encoding(sources)))


@torch.inference_mode()
def name_languages(model: PreTrainedModel, sources: Sequence[Source]) -> list[Source]:
    """The same sources with whole prefixes: languages left open are named by the model, as its
    `generate` does (`detect_language`). One more call of the decoder; sources are encoded."""
    if not any(source.chosen_from is not None for source in sources):
        return list(sources)
    named = model.detect_language(encoder_outputs=given_outputs(sources))
    return [
        replace(
            source,
            prefix=torch.cat([source.prefix[:1], language.view(1), source.prefix[1:]]),
            chosen_from=None,
        )
        for source, language in zip(sources, named, strict=True)
    ]
