"""The methods beside the drafter's own: `others` of `drafttrain eval`, in either mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.kinds import NONE, named_kind
from drafttrain.config.sweep import expand_sweep
from drafttrain.config.trees import TREES


@dataclass(frozen=True)
class OtherMethod:
    """A method among `others`."""

    name: str
    """What `others` calls it."""
    label: str
    """What reports call it: the same, with its draft length where that is swept."""
    config: DecodeConfig


def other_methods(settings: EvalConfig) -> list[OtherMethod]:
    """All of them, decoding as the drafter does.

    Chains that have no stop of their own are measured at every k of a sweep, as the drafter is.
    Raises ConfigError for those that would decode otherwise or draft nothing, and for methods that
    reports would call the same.
    """
    swept = settings.sweep.get("k", ())
    found = [method for name in settings.others for method in _methods_of(settings, name, swept)]
    labels = [method.label for method in found]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ConfigError(
            f"others has two methods that reports would call {repeated[0]!r}, as k is swept; give "
            "one of them another name"
        )
    return found


def _methods_of(settings: EvalConfig, name: str, lengths: Sequence[float]) -> list[OtherMethod]:
    other = settings.others[name]
    if "sampling" in other.model_fields_set:
        raise ConfigError(
            f"others.{name}.sampling is given, but all methods decode as decode.sampling says; "
            "leave it out"
        )
    if other.drafter is None or named_kind(other.drafter) is NONE:
        raise ConfigError(
            f"others.{name}.drafter = {other.drafter!r}; give a drafter (plain decoding is "
            "measured in any case)"
        )
    chains = other.cascade is None and TREES[other.tree.kind].shape is None
    if lengths and chains and "stop" not in other.model_fields_set:
        methods = expand_sweep(other, {"k": lengths})
        named = [(f"{name} k={method.stop.k}", method) for method in methods]
    else:
        named = [(name, other)]
    same = {"sampling": settings.decode.sampling}
    return [OtherMethod(name, label, one.model_copy(update=same)) for label, one in named]
