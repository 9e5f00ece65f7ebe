"""Cascades from settings: levels under names of their own, the matrix K, what a call costs."""

from __future__ import annotations

from pathlib import Path

from drafttrain.build.pairs import Pair
from drafttrain.config.decode import CascadeConfig, DecodeConfig
from drafttrain.decoding.drafters.cascade import (
    InTurnDrafter,
    Level,
    cascade,
    show_increments,
)
from drafttrain.decoding.engine.cached_model import CachedModel


def build_levels(decode: DecodeConfig, pair: Pair) -> list[Level]:
    """The drafters, the largest first, named as their folders are."""
    assert decode.cascade is not None
    names = level_names(str(decode.drafter), decode.cascade)
    drafters = [pair.drafter, *(pair.companions[path] for path in decode.cascade.drafters)]
    return [Level(name, drafter) for name, drafter in zip(names, drafters, strict=True)]


def build_cascade(decode: DecodeConfig, pair: Pair) -> InTurnDrafter:
    """The cascade asked for, its levels named in the order of the settings."""
    settings = decode.cascade
    assert settings is not None
    levels, matrix = build_levels(decode, pair), settings.matrix()
    lenient = f" l={settings.leniency:g}" if settings.leniency > 1 else ""
    name = f"cascade {'>'.join(level.name for level in levels)} {show_increments(matrix)}{lenient}"
    ends = CachedModel(pair.target.model).eos_ids
    return cascade(levels, matrix, settings.leniency, ends, name)


def cascade_ratios(decode: DecodeConfig, pair: Pair) -> dict[str, float]:
    """Parameters of each level over the target's, by the names of the levels."""
    assert decode.cascade is not None
    names = level_names(str(decode.drafter), decode.cascade)
    first = pair.parameter_ratio()
    others = [pair.companion_ratio(path) for path in decode.cascade.drafters]
    return dict(zip(names, [first or 0.0, *others], strict=True))


def level_names(drafter: str, settings: CascadeConfig) -> list[str]:
    """Short names of the levels: the last part of each path that tells it from the others."""
    paths = [Path(path) for path in (drafter, *settings.drafters)]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(_telling(path)[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _telling(path: Path) -> tuple[str, ...]:
    """The parts of a path; a run's final/ says nothing."""
    parts = path.parts
    return parts[:-1] if len(parts) > 1 and parts[-1] == "final" else parts
