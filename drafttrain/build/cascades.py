"""Cascades from settings: levels under names of their own, the matrix K, what a call costs."""

from __future__ import annotations

from pathlib import Path

from drafttrain.build.pairs import Pair
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import CascadeConfig, DecodeConfig, StopConfig
from drafttrain.config.kinds import copies_text, named_kind
from drafttrain.config.trees import TREES
from drafttrain.decoding.drafters.cascade import (
    InTurnDrafter,
    Level,
    cascade,
    check_increments,
    show_increments,
)
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.models.drafters import read_kind


def check_cascade(decode: DecodeConfig) -> None:
    """Refuse a cascade that cannot be right, before any large model is loaded.

    Raises ConfigError for increments of another shape or without a token, levels that are the same,
    plain decoding or max-gram before the last, leniency that counts for nothing, and a draft length
    or trees beside them.
    """
    settings = decode.cascade
    if settings is None:
        return
    paths = [str(decode.drafter), *settings.drafters]
    for place, path in enumerate(paths):
        copies = copies_text(path)
        if named_kind(path) is not None and not (copies and place == len(paths) - 1):
            why = "is the smallest there is" if copies else "drafts nothing"
            raise ConfigError(f"{path!r} {why}, but is level {place + 1} of a cascade of {paths}")
        if path in paths[:place]:
            raise ConfigError(f"{path!r} is twice in the cascade of {paths}; give each level once")
    matrix = settings.matrix()
    try:
        check_increments(matrix, paths)
    except ValueError as error:
        raise ConfigError(f"cascade.{error}") from None
    if not sum(matrix[0]):
        raise ConfigError(
            f"cascade.increments = {show_increments(matrix)!r} asks for no token in a round; its "
            "first row must add up to 1 or more"
        )
    if settings.leniency > 1 and not _reviews_models(paths, matrix):
        raise ConfigError(
            f"cascade.leniency = {settings.leniency} counts where a language model reviews another "
            f"model's tokens, which none does in {paths} with increments "
            f"{show_increments(matrix)!r}; leave it out"
        )
    if "k" in decode.stop.model_fields_set or decode.stop.kind != "fixed":
        raise ConfigError(
            "stop is given, but a cascade drafts as many tokens in a round as the first row of its "
            f"increments adds up to ({sum(matrix[0])}); leave --k and --stop out"
        )
    if TREES[decode.tree.kind].shape is not None:
        raise ConfigError(
            f"tree.kind = {decode.tree.kind!r}, but a cascade drafts chains; leave one of the two "
            "out"
        )


def _reviews_models(paths: list[str], matrix: tuple[tuple[int, ...], ...]) -> bool:
    """Whether some level reviews tokens that are not max-gram's."""
    for depth in range(1, len(paths)):
        drafting = [path for path, count in zip(paths[depth:], matrix[depth], strict=True) if count]
        models = [path for path in drafting if not copies_text(path)]
        if models and read_kind(paths[depth - 1]).is_language_model:
            return True
    return False


def other_drafters(decode: DecodeConfig) -> tuple[str, ...]:
    """Drafters that take part beside the first one."""
    return decode.tree.drafters if decode.cascade is None else decode.cascade.drafters


def cascade_stop(decode: DecodeConfig) -> StopConfig:
    """The stop policy asked for; a cascade drafts all its increments."""
    if decode.cascade is None:
        return decode.stop
    return StopConfig(kind="fixed", k=sum(decode.cascade.matrix()[0]))


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
