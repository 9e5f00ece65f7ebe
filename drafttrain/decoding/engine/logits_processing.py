"""The target's own logits processors, applied to every row with that row's own path.

A target's `generation_config` may ask for bad words, forced first and last tokens, minimal
lengths, no-repeat n-grams, repetition penalties and suppressed tokens. Transformers builds the
processors; here the row after a draft token is processed as if the prefix and the path to that
token had been generated. What a draft cannot be judged under is refused by name; what does not
change single-beam decoding (beam counts, length_penalty, caching, output flags) is ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    PreTrainedModel,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from drafttrain.decoding.engine.architectures import device_of
from drafttrain.decoding.types import Sampling, Source

REFUSED = (
    "guidance_scale",
    "watermarking_config",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "token_healing",
    "stop_strings",
    "max_time",
    "use_mtp",
    "diversity_penalty",
    "return_timestamps",
    "no_speech_threshold",
)
"""Settings of a generation_config that this engine cannot honour."""

REFUSED_WARPERS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Refused where the target samples; greedy decoding does not look at them."""

NEUTRAL = {"guidance_scale": 1.0, "typical_p": 1.0, "diversity_penalty": 0.0}
"""Values that ask for nothing, beside None, False, 0 and 0.0."""


class TargetProcessors:
    """The logits processors that a target's `generation_config` asks for.

    Raises ValueError where it asks for something that cannot be honoured row by row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        settings = model.generation_config if generation_config is None else generation_config
        check_generation_config(settings, sampling)
        config = copy.deepcopy(settings)
        # temperature, top-k and top-p are the user's, not the target's; beams do not apply
        config.update(do_sample=False, num_beams=1, num_return_sequences=1)
        config.update(renormalize_logits=False)
        self._config, _ = model._prepare_generation_config(config)
        model._prepare_special_tokens(self._config, device=device_of(model))
        self._model = model
        anything = torch.zeros(1, dtype=torch.long, device=device_of(model))
        built = self._build(Source.of_text(anything, anything), max_new_tokens=1)
        self.kinds = frozenset(map(type, built))
        """Classes of the processors."""

    @property
    def change_logits(self) -> bool:
        """Whether there are any; without them every row is the model's own."""
        return bool(self.kinds)

    def start(self, source: Source, max_new_tokens: int) -> RowProcessors:
        """The processors for one sequence (some look at its source or its maximal length)."""
        return RowProcessors(self._build(source, max_new_tokens) if self.change_logits else [])

    def _build(self, source: Source, max_new_tokens: int) -> Sequence[LogitsProcessor]:
        config = copy.copy(self._config)
        config.max_length = len(source.prefix) + max_new_tokens
        return self._model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(source.prefix),
            encoder_input_ids=source.input_ids[None] if source.is_text else None,
            device=source.prefix.device,
        )


class RowProcessors:
    """Processors of one sequence, called with each row's own path."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = list(processors)

    def __call__(
        self, tokens: Tensor, draft: Tensor, logits: Tensor, parents: Tensor | None = None
    ) -> Tensor:
        """Row 0 is processed as the continuation of tokens, row i + 1 as that of draft node i.

        parents holds each node's parent, -1 = the last committed token; None = the draft is a
        chain. Shapes: tokens [T] (all committed), draft and parents [N], logits [N + 1, V] ->
        [N + 1, V].
        """
        if not self._processors:
            return logits
        tokens = tokens.to(logits.device)
        paths = _paths(tokens, draft.to(tokens.device), parents)
        for processor in self._processors:
            if isinstance(processor, SuppressTokensLogitsProcessor):
                logits = _suppressed(logits, processor.suppress_tokens)
            elif isinstance(processor, SuppressTokensAtBeginLogitsProcessor):
                first = [i for i, path in enumerate(paths) if len(path) == processor.begin_index]
                if first:
                    logits = logits.clone()
                    logits[first] = _suppressed(logits[first], processor.begin_suppress_tokens)
            elif isinstance(processor, InfNanRemoveLogitsProcessor):  # all rows alike
                logits = processor(tokens[None], logits)
            else:
                rows = [
                    processor(path[None], row[None])
                    for path, row in zip(paths, logits, strict=True)
                ]
                logits = torch.cat(rows)
        return logits


def _suppressed(logits: Tensor, ids: Tensor) -> Tensor:
    """As Transformers does, which searches the whole vocabulary for the ids in every call: for
    Whisper's 90 that takes longer than its output layer. Shapes: [N, V] -> [N, V]."""
    known = ids[(ids >= 0) & (ids < logits.shape[-1])].to(logits.device)
    return logits.index_fill(-1, known, float("-inf"))


def _paths(tokens: Tensor, draft: Tensor, parents: Tensor | None) -> list[Tensor]:
    """All tokens that each row of logits follows: the committed ones, then those up to a node."""
    if parents is None:
        whole = torch.cat([tokens, draft])
        return [whole[: len(tokens) + i] for i in range(len(draft) + 1)]
    paths = [tokens]
    for token, parent in zip(draft[:, None], parents.tolist(), strict=True):
        paths.append(torch.cat([paths[parent + 1], token]))
    return paths


def unavailable(config: GenerationConfig, greedy: bool) -> str | None:
    """The first setting that this engine cannot honour, if any."""
    values = config.to_dict()
    names = REFUSED if greedy else REFUSED + REFUSED_WARPERS
    asked = {name: value for name in names if (value := values.get(name))}
    return next((name for name, value in asked.items() if value != NEUTRAL.get(name)), None)


def check_generation_config(config: GenerationConfig, sampling: Sampling) -> None:
    """Refuse by name what this engine cannot honour of a target's settings. Raises ValueError."""
    if name := unavailable(config, sampling.greedy):
        raise ValueError(
            f"the target's generation_config sets {name}={getattr(config, name)!r}, which cannot "
            f"be honoured when drafts are verified; set model.generation_config.{name} = None, or "
            "take it out of its generation_config.json"
        )
