"""Write down clips with a converted Whisper. Plain data only, as other processes do it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafttrain.decoding.ctranslate2.translate import Placement, check_placement


@dataclass(frozen=True)
class Transcription:
    """How clips are written down; JSON can hold it. Which tokens are suppressed is said in the
    converted model."""

    end_id: int
    """What ends an output."""
    max_new_tokens: int


def load_transcriber(folder: Path, placement: Placement) -> Any:
    """A converted Whisper, ready to decode. Raises ValueError as `check_placement`."""
    import ctranslate2

    check_placement(placement)
    return ctranslate2.models.Whisper(
        str(folder),
        device=placement.device,
        device_index=placement.index,
        compute_type=placement.compute_type,
        inter_threads=placement.workers,
        intra_threads=max(1, placement.threads // placement.workers),
    )


def transcribe(
    whisper: Any, features: np.ndarray, prefixes: Sequence[Sequence[int]], how: Transcription
) -> list[list[int]]:
    """The tokens after each prefix, EOS included, greedily; all clips are one batch.

    Shapes: features [B, M, F] float32.
    """
    import ctranslate2

    most, longest = how.max_new_tokens, max(map(len, prefixes))
    results = whisper.generate(
        ctranslate2.StorageView.from_array(np.ascontiguousarray(features)),
        [list(prefix) for prefix in prefixes],
        beam_size=1,
        # it generates so many less the prefix, and at most half of them
        max_length=max(2 * most, most + longest),
        suppress_blank=True,
        suppress_tokens=[-1],  # those of the converted model
    )
    return [[*result.sequences_ids[0], how.end_id][:most] for result in results]
