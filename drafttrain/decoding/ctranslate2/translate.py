"""Decode token ids with a converted model. Plain data only, as other processes do it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

WORKER_ROWS = 128
"""Rows of a worker's batch. On 2 cores the embedded target's outputs come at 5,600 tokens a second
in batches of 16, 10,600 of 64 and 11,700 of 128, by one worker of 2 threads; 14,800 by two."""


@dataclass(frozen=True)
class Translation:
    """How sources are decoded; JSON can hold it."""

    prefix: list[int]
    """What every decoder starts from: its start token, then the tokens forced behind it."""
    end_ids: list[int]
    """Any of these ends an output."""
    max_new_tokens: int
    last_id: int | None = None
    """What the last of max_new_tokens tokens is, if it is forced."""
    asked: dict[str, Any] = field(default_factory=dict)
    """More of CTranslate2's own settings, by the names of its `translate_batch`."""


@dataclass(frozen=True)
class Placement:
    """Where a converted model computes, and how."""

    device: str = "cpu"
    """cpu or cuda."""
    index: int = 0
    """Which of them."""
    compute_type: str = "float32"
    """In CTranslate2's words: float32, float16, bfloat16, int8_float32, ..."""
    threads: int = 1
    workers: int = 1
    """Batches that are decoded side by side, by an equal share of the threads each."""


def check_placement(placement: Placement) -> None:
    """Raise ValueError where the numbers cannot be had on the device."""
    import ctranslate2

    kinds = ctranslate2.get_supported_compute_types(placement.device, placement.index)
    if placement.compute_type not in kinds:
        raise ValueError(
            f"CTranslate2 has no {placement.compute_type} on this {placement.device}, but "
            f"{', '.join(sorted(kinds))}; give another target.dtype or target.device, or leave "
            "ctranslate2 out"
        )


def load_translator(folder: Path, placement: Placement) -> Any:
    """A converted model, ready to decode. Raises ValueError as `check_placement`."""
    import ctranslate2

    check_placement(placement)
    return ctranslate2.Translator(
        str(folder),
        device=placement.device,
        device_index=placement.index,
        compute_type=placement.compute_type,
        inter_threads=placement.workers,
        intra_threads=max(1, placement.threads // placement.workers),
    )


def translate(
    translator: Any, sources: Sequence[Sequence[int]], how: Translation
) -> list[list[int]]:
    """The tokens after the start token, EOS included, of each source; all are one batch."""
    return [_tokens(result, how) for result in _results(translator, sources, how)]


def translate_checked(
    translator: Any, sources: Sequence[Sequence[int]], how: Translation
) -> list[list[int] | None]:
    """The same in batches that workers share out; None for an output whose score is not finite
    (costs a log-softmax a token)."""
    more = {"return_scores": True, "max_batch_size": WORKER_ROWS}
    return [
        _tokens(result, how) if isfinite(result.scores[0]) else None
        for result in _results(translator, sources, how, **more)
    ]


def _results(
    translator: Any, sources: Sequence[Sequence[int]], how: Translation, **more: int
) -> list[Any]:
    return translator.translate_batch(
        [list(map(str, source)) for source in sources],
        target_prefix=[list(map(str, how.prefix))] * len(sources),
        end_token=how.end_ids,
        return_end_token=True,
        max_input_length=0,
        max_decoding_length=how.max_new_tokens,
        **how.asked,
        **more,
    )


def _tokens(result: Any, how: Translation) -> list[int]:
    tokens = [int(token) for token in result.hypotheses[0]]
    if how.last_id is not None and len(tokens) == how.max_new_tokens:
        tokens[-1] = how.last_id
    return tokens
