"""The target's logits processors, applied to every row of logits with that row's own path.

Transformers builds the processors of a target's `generation_config` (bad words, forced tokens,
minimal lengths, penalties, ...). The row after a draft token is processed as if the prefix and the
path to that token had been generated. Settings that do not work with draft verification are refused
by name; those without effect on single-beam decoding are ignored.
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
"""Settings of a generation_config that this engine does not support."""

REFUSED_WARPERS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings refused only if the target samples; greedy decoding ignores them."""

NEUTRAL = {"guidance_scale": 1.0, "typical_p": 1.0, "diversity_penalty": 0.0}
"""Values without effect, besides None, False, 0 and 0.0."""


class TargetProcessors:
    """The logits processors of a target's `generation_config`.

    Raises ValueError if it has a setting that is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        config = copy.deepcopy(generation_config or model.generation_config)
        check_generation_config(config, sampling)
        # `Sampling` replaces temperature, top-k and top-p of the target; beams do not apply
        config.update(do_sample=False, num_beams=1, num_return_sequences=1)
        config.update(renormalize_logits=False)
        self._config, _ = model._prepare_generation_config(config)
        model._prepare_special_tokens(self._config, device=device_of(model))
        self._model = model
        token = torch.zeros(1, dtype=torch.long, device=device_of(model))
        self.change_logits = bool(self._build(Source.of_text(token, token), max_new_tokens=1))
        """Whether there is any processor; if not, logits are the model's own."""

    def start(self, source: Source, max_new_tokens: int) -> RowProcessors:
        """Returns the processors of one sequence; some depend on its source or maximal length."""
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
    """Logits processors of one sequence, applied to each row with its own path."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors

    def __call__(
        self, tokens: Tensor, draft: Tensor, logits: Tensor, parents: Tensor | None = None
    ) -> Tensor:
        """Processes row 0 as the continuation of tokens, row i + 1 as that of draft node i.

        parents: each node's parent, -1 for the last committed token; None: the draft is a chain.
        Shapes: tokens [T] (all committed), draft and parents [N], logits [N + 1, V] -> [N + 1, V].
        """
        if not self._processors:
            return logits
        tokens = tokens.to(logits.device)
        paths = _paths(tokens, draft.to(logits.device), parents)
        for processor in self._processors:
            if isinstance(processor, SuppressTokensLogitsProcessor):
                logits = _suppressed(logits, processor.suppress_tokens)
            elif isinstance(processor, SuppressTokensAtBeginLogitsProcessor):
                first = [i for i, path in enumerate(paths) if len(path) == processor.begin_index]
                if first:
                    logits = logits.clone()
                    logits[first] = _suppressed(logits[first], processor.begin_suppress_tokens)
            elif isinstance(processor, InfNanRemoveLogitsProcessor):  # does not read the path
                logits = processor(tokens[None], logits)
            else:
                rows = zip(paths, logits, strict=True)
                logits = torch.cat([processor(path[None], row[None]) for path, row in rows])
        return logits


def _suppressed(logits: Tensor, ids: Tensor) -> Tensor:
    """Sets the logits of these ids to minus infinity. Shapes: [N, V] -> [N, V].

    Transformers' processor searches the whole vocabulary for the ids in every call. For Whisper's
    90 ids that takes longer than its output layer.
    """
    valid = ids[(ids >= 0) & (ids < logits.shape[-1])].to(logits.device)
    return logits.index_fill(-1, valid, float("-inf"))


def _paths(tokens: Tensor, draft: Tensor, parents: Tensor | None) -> list[Tensor]:
    """Returns the tokens before each row of logits: the committed ones and the path to a node."""
    if parents is None:
        whole = torch.cat([tokens, draft])
        return [whole[: len(tokens) + i] for i in range(len(draft) + 1)]
    paths = [tokens]
    for token, parent in zip(draft[:, None], parents.tolist(), strict=True):
        paths.append(torch.cat([paths[parent + 1], token]))
    return paths


def unavailable(config: GenerationConfig, greedy: bool) -> str | None:
    """Returns the name of the first setting that is not supported, or None."""
    values = config.to_dict()
    names = REFUSED if greedy else REFUSED + REFUSED_WARPERS
    present = (name for name in names if values.get(name))
    return next((name for name in present if values[name] != NEUTRAL.get(name)), None)


def check_generation_config(config: GenerationConfig, sampling: Sampling) -> None:
    """Raises ValueError naming the first setting that is not supported."""
    if name := unavailable(config, sampling.greedy):
        raise ValueError(
            f"the target's generation_config sets {name}={getattr(config, name)!r}, which is not "
            f"supported with draft verification; set model.generation_config.{name} = None, or "
            "remove it from its generation_config.json"
        )
