"""What the decoder of a Whisper starts from, as `generate` works it out from generation_config.

The start token, the language of the clip, the task, and `<|notimestamps|>`: whichever the settings
name. A language that they leave open is chosen by the model when it encodes the clip.
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
    """What a decoder starts from."""

    tokens: tuple[int, ...]
    """Without the language, where that is left to the model."""
    languages: tuple[int, ...] | None = None
    """Tokens of which the model chooses one behind the first token; None: nothing is left open."""


def speech_source(features: Tensor, model: PreTrainedModel) -> Source:
    """A source from the log-mel features of a clip [M, F], on the model's device."""
    start = read_start(model.generation_config, model.config)
    device = device_of(model)
    chosen = None if start.languages is None else torch.tensor(start.languages, device=device)
    prefix = torch.tensor(start.tokens, device=device)
    return Source({"input_features": features.to(device)}, prefix, chosen)


def read_start(settings: GenerationConfig, config: PretrainedConfig) -> Start:
    """The start that `generate` would give the decoder (`_retrieve_init_tokens`).

    `language` and `task` go before the older `forced_decoder_ids`. Raises ValueError for a
    language that the model does not know, for either of the two where the model is English alone,
    and for forced tokens with gaps.
    """
    values = settings.to_dict()
    task, language = values.get("task"), values.get("language")
    languages, tasks = values.get("lang_to_id"), values.get("task_to_id")
    check_language_and_task(settings)
    forced: list[int | None] = []
    if task is None and language is None:
        forced = _forced(values.get("forced_decoder_ids") or _older_forced(config))
    tokens = [start_of_transcript(settings), *forced]
    open_language = False
    if language is not None:
        tokens[1:2] = [language_token(language, languages)]
    elif languages is not None and (len(tokens) == 1 or tokens[1] is None):
        tokens[1:2] = [None]
        open_language = True
    if task is not None:
        tokens.append(tasks[task])
    elif language is not None and tasks and not set(tasks.values()) & set(tokens):
        tokens.append(tasks["transcribe"])
    plain = values.get("no_timestamps_token_id")
    if plain is not None and tokens[-1] != plain:
        tokens.append(plain)
    whole = tuple(token for token in tokens if token is not None)
    return Start(whole, tuple(sorted(languages.values())) if open_language else None)


def start_of_transcript(settings: GenerationConfig) -> int:
    """The first token. Raises ValueError where the settings name none."""
    start = settings.decoder_start_token_id
    if not isinstance(start, int):
        raise ValueError(
            f"the target's generation_config has decoder_start_token_id={start!r}; one token id "
            "is needed"
        )
    return start


def _older_forced(config: PretrainedConfig) -> list[list[int | None]]:
    return config.to_dict().get("forced_decoder_ids") or []


def _forced(pairs: list[list[int | None]]) -> list[int | None]:
    """[[1, token], [2, token], ...] -> the tokens; None stands for a language left open."""
    if not pairs or pairs[0][0] != 1:
        return []
    places = [place for place, _ in pairs]
    if places != list(range(1, len(pairs) + 1)):
        raise ValueError(
            f"the target's generation_config has forced_decoder_ids={pairs!r}, with gaps; set "
            "language and task instead"
        )
    return [token for _, token in pairs]
