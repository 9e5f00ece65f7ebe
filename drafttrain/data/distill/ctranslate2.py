"""The backend `ctranslate2`: greedy and beam outputs of encoder-decoder targets, in C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from drafttrain.config.backends import CTRANSLATE2
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, batches_by_length
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.ctranslate2.settings import placement, translation
from drafttrain.decoding.ctranslate2.translate import load_translator, translate_checked
from drafttrain.models.ctranslate2 import (
    check_convertible,
    check_installed,
    convert,
    package_version,
)
from drafttrain.models.loading import LoadedTarget, check_target
from drafttrain.models.speech import hears

QUEUED = 8
"""Batches that are handed over at once, so that workers seldom wait for the last of them."""
ASKED = "backend = 'ctranslate2'"


def check_ctranslate2(config: DistillConfig) -> None:
    """Refuse targets that cannot be converted, by their config.json. Raises ConfigError."""
    check_installed(ASKED)
    model_config = check_target(config.target)
    check_convertible(model_config, ASKED)
    if hears(model_config):
        raise ConfigError(
            f"{ASKED} reads texts alone, but target.path = {config.target.path!r} hears audio; use "
            "transformers or engine"
        )


def open_ctranslate2(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """Converts the target to a temporary folder, which is gone once it is loaded.

    Raises ConfigError for a target that cannot be converted, and for what its generation_config
    asks for and is not honoured.
    """
    check_installed(ASKED)
    check_convertible(target.model.config, ASKED)
    beams = config.num_beams if config.method == "beam" else 1
    try:
        how = translation(target.model, config.sampling.max_new_tokens, beams)
        with TemporaryDirectory() as folder:
            convert(target.model, Path(folder))
            place = placement(target.model)
            workers = place.threads if place.device == "cpu" else 1
            translator = load_translator(Path(folder), replace(place, workers=workers))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None

    def decode(rows: Sequence[ShardRow]) -> list[list[int] | None]:
        try:
            return translate_checked(translator, [row.source_ids for row in rows], how)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise torch.OutOfMemoryError(str(error)) from None

    return BatchDecoder(
        CTRANSLATE2.name,
        decode,
        partial(batches_by_length, batch_tokens=QUEUED * config.batch_tokens),
        {"batch_tokens": config.batch_tokens},
        {CTRANSLATE2.name: package_version()},
    )
