"""Decoder prefix of Whisper models, derived from generation_config as `generate` does.

It has the start token, the language of the clip, the task and `<|notimestamps|>`, as far as the
settings name them. If they name no language, the model chooses one when it encodes the clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from drafttrain.decoding.engine.architectures import device_of
from drafttrain.decoding.types import Source
from drafttrain.models.speech import check_language_and_task, language_token


@dataclass(frozen=True)
class Start:
    """The tokens that a decoder starts from."""

    tokens: tuple[int, ...]
    """The prefix, without the language token if the model chooses it."""
    languages: tuple[int, ...] | None = None
    """Tokens of which the model chooses one after the first token; None: the prefix is complete."""


def speech_source(features: Tensor, model: PreTrainedModel) -> Source:
    """Returns a source from a clip's log-mel features [M, F], on the model's device."""
    start = read_start(model.generation_config, model.config)
    device = device_of(model)
    chosen = None if start.languages is None else torch.tensor(start.languages, device=device)
    prefix = torch.tensor(start.tokens, device=device)
    return Source({"input_features": features.to(device)}, prefix, chosen)


def read_start(settings: GenerationConfig, config: PretrainedConfig) -> Start:
    """Returns the prefix that `generate` gives the decoder (`_retrieve_init_tokens`).

    `language` and `task` override the older `forced_decoder_ids`. Raises ValueError for a language
    or task that the model does not know, for either of them if the model is English-only, and for
    forced tokens with gaps.
    """
    values = settings.to_dict()
    task, language = values.get("task"), values.get("language")
    languages, tasks = values.get("lang_to_id"), values.get("task_to_id")
    check_language_and_task(settings)
    forced: list[int | None] = []
    if task is None and language is None:
        forced = _forced(values.get("forced_decoder_ids") or _older_forced(config))
    tokens = [start_of_transcript(settings), *forced]
    language_is_open = False
    if language is not None:
        tokens[1:2] = [language_token(language, languages)]
    elif languages is not None and (len(tokens) == 1 or tokens[1] is None):
        tokens[1:2] = [None]
        language_is_open = True
    if task is not None:
        tokens.append(tasks[task])
    elif language is not None and tasks and not set(tasks.values()) & set(tokens):
        tokens.append(tasks["transcribe"])
    no_timestamps = values.get("no_timestamps_token_id")
    if no_timestamps is not None and tokens[-1] != no_timestamps:
        tokens.append(no_timestamps)
    prefix = tuple(token for token in tokens if token is not None)
    return Start(prefix, tuple(sorted(languages.values())) if language_is_open else None)


def start_of_transcript(settings: GenerationConfig) -> int:
    """Returns the first token. Raises ValueError if the settings do not name it."""
    start = settings.decoder_start_token_id
    if not isinstance(start, int):
        raise ValueError(
            f"the target's generation_config has decoder_start_token_id={start!r}; set it to one "
            "token id"
        )
    return start


def _older_forced(config: PretrainedConfig) -> list[list[int | None]]:
    return config.to_dict().get("forced_decoder_ids") or []


def _forced(pairs: list[list[int | None]]) -> list[int | None]:
    """Converts [[1, token], [2, token], ...] to tokens; None: a language that is left open."""
    if not pairs or pairs[0][0] != 1:
        return []
    positions = [position for position, _ in pairs]
    if positions != list(range(1, len(pairs) + 1)):
        raise ValueError(
            f"the target's generation_config has forced_decoder_ids={pairs!r}, with gaps; set "
            "language and task instead"
        )
    return [token for _, token in pairs]
