"""What a target's generation_config asks for, in CTranslate2's settings.

Every logits processor that Transformers would build is put into a setting of CTranslate2 that does
the same, or refused by name. Greedy outputs are then the same. Beam search is CTranslate2's own: it
ends when so many hypotheses are finished, where Transformers compares scores (`PATIENCE`), and it
scores the last token of an output that reaches the full length even where that token is forced.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from drafttrain.decoding.ctranslate2.transcribe import Transcription
from drafttrain.decoding.ctranslate2.translate import Placement, Translation
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.sources import start_token
from drafttrain.decoding.types import Sampling

HONOURED: frozenset[type[LogitsProcessor]] = frozenset(
    {
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        InfNanRemoveLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        SuppressTokensLogitsProcessor,
    }
)
"""Processors of Transformers that CTranslate2 has something for."""
HONOURED_OF_SPEECH: frozenset[type[LogitsProcessor]] = frozenset(
    {SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor}
)
"""Those that it has something for where clips are written down."""
BARRING: frozenset[type[LogitsProcessor]] = frozenset(
    {
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        SuppressTokensLogitsProcessor,
    }
)
"""Those of them that bar tokens before a search compares scores."""
PATIENCE = {True: 1.0, False: 3.0, None: 3.0}
"""CTranslate2's patience by Transformers' `early_stopping`: so many times the beams are finished
before a search ends. True is the same; the default goes on while an unfinished beam could win, for
which 3 was enough on 600 sentences (1: 580 outputs were the same)."""


def translation(model: PreTrainedModel, max_new_tokens: int, num_beams: int = 1) -> Translation:
    """How CTranslate2 decodes as the model's own `generate` does, greedily or with beams.

    Raises ValueError naming what cannot be honoured.
    """
    config, start = model.generation_config, start_token(model)
    kinds = TargetProcessors(model, Sampling()).kinds
    end_ids, last_ids = _as_list(config.eos_token_id), _as_list(config.forced_eos_token_id)
    ends = [[end] for end in end_ids]
    barred = [[token] for token in config.suppress_tokens or ()]
    barred += [ids for ids in config.bad_words_ids or () if ids not in ends]
    _check(config, kinds, num_beams, start_may_follow=[start] not in ends + barred)
    prefix = [start]
    if config.forced_bos_token_id is not None:
        prefix.append(config.forced_bos_token_id)
    # the start token counts in min_length
    shortest = max((config.min_length or 0) - 1, config.min_new_tokens or 0, 0)
    asked: dict[str, Any] = {
        "beam_size": num_beams,
        "min_decoding_length": min(shortest, max_new_tokens),
        "no_repeat_ngram_size": config.no_repeat_ngram_size or 0,
        "suppress_sequences": [list(map(str, ids)) for ids in barred] or None,
    }
    if num_beams > 1:
        penalty = config.length_penalty
        asked["length_penalty"] = 1.0 if penalty is None else penalty
        asked["patience"] = PATIENCE[config.early_stopping]
    last = min(last_ids) if last_ids else None
    return Translation(prefix, end_ids, max_new_tokens, last, asked)


def _check(
    config: GenerationConfig,
    kinds: frozenset[type[LogitsProcessor]],
    num_beams: int,
    start_may_follow: bool,
) -> None:
    """Refuse by name what CTranslate2 would do otherwise. Raises ValueError.

    start_may_follow: whether the start token may be generated, too.
    """
    for kind in sorted(kinds - HONOURED, key=str):
        raise _refused(f"asks for a {kind.__name__}")
    ngram = config.no_repeat_ngram_size
    if ngram == 1 or (ngram and start_may_follow):
        raise _refused(
            f"sets no_repeat_ngram_size={ngram}, counting the decoder's start token in",
            "give bad_words_ids with that token alone, and more than 1, in its "
            "generation_config.json",
        )
    if num_beams > 1 and config.early_stopping not in PATIENCE:
        raise _refused(f"sets early_stopping={config.early_stopping!r}")
    if num_beams > 1 and kinds & BARRING and not config.renormalize_logits:
        names = ", ".join(sorted(kind.__name__ for kind in kinds & BARRING))
        raise _refused(
            f"bars tokens ({names}) from beams without spreading their probability over the others",
            "set renormalize_logits to true in its generation_config.json",
        )


def transcription(model: PreTrainedModel, max_new_tokens: int) -> Transcription:
    """How CTranslate2 writes clips down as a Whisper's own `generate` does, greedily.

    Raises ValueError naming what cannot be honoured.
    """
    config = model.generation_config
    for kind in sorted(TargetProcessors(model, Sampling()).kinds - HONOURED_OF_SPEECH, key=str):
        raise _refused(f"asks for a {kind.__name__}")
    if getattr(config, "no_timestamps_token_id", None) is None:
        raise _refused("names no token for no timestamps, without which it would write them")
    ends = _as_list(config.eos_token_id)
    if len(ends) != 1:
        raise _refused(f"has eos_token_id={config.eos_token_id!r}, where one token is needed")
    return Transcription(ends[0], max_new_tokens)


def placement(model: PreTrainedModel, int8: bool = False) -> Placement:
    """Where the model itself computes, with its numbers or with weights of 8 bits."""
    device, dtype = model.device, str(model.dtype).removeprefix("torch.")
    dtype = "float32" if dtype == "float64" else dtype
    return Placement(
        device=device.type,
        index=device.index or 0,
        compute_type=f"int8_{dtype}" if int8 else dtype,
        threads=torch.get_num_threads(),
    )


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list) else [ids]


def _refused(what: str, remedy: str = "change its generation_config.json") -> ValueError:
    return ValueError(
        f"the target's generation_config {what}, which CTranslate2 cannot honour; {remedy}, or "
        "leave ctranslate2 out"
    )
