"""Sweeps: one method setting becomes several (SpecDec Tables 3 and 4, SpecDec++ Figure 4)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from pydantic import ValidationError

from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.stops import STOPS
from drafttrain.config.verifiers import RULES

STOP_OF = {stop.varied: stop for stop in STOPS.values()}
"""Setting of a stop policy that can be swept -> the policy that goes by it."""
RULE_OF = {setting.name: rule for rule in RULES.values() for setting in rule.settings}
"""The same of verifiers."""
WORDS = {setting.name for rule in RULES.values() for setting in rule.settings if setting.choices}
"""Those that are words, not numbers."""
Value = float | str
SWEEPABLE = (*STOP_OF, *RULE_OF)


def expand_sweep(decode: DecodeConfig, sweep: Mapping[str, Sequence[Value]]) -> list[DecodeConfig]:
    """The methods that a sweep asks for, each once.

    Every k, h, entropy, delta, ... is a stop policy of that kind, beside the one asked
    for by `stop.kind`, if it was given. All are measured with the verifier asked for; beta and tau
    add Spec-Verification at each of their pairs, rule and alpha deferral at each of theirs. Without
    a sweep: the method itself. Raises ConfigError naming the setting for unknown names, no values,
    and values out of range.
    """
    for name, values in sweep.items():
        _check(name, values)
    methods = []
    for stop in _stops(decode, sweep):
        for verifier in _verifiers(decode, sweep):
            method = _with_parts(decode, stop, verifier)
            if method not in methods:
                methods.append(method)
    return methods


def _stops(decode: DecodeConfig, sweep: Mapping[str, Sequence[Value]]) -> list[dict[str, Any]]:
    """Settings of each stop policy, without those that belong to another kind alone."""
    given = decode.stop.model_dump(exclude_unset=True)  # what was not given stays not given
    swept = [name for name in STOP_OF if name in sweep]
    asked_for = "kind" in given and decode.stop.kind not in [STOP_OF[name].name for name in swept]
    if not swept:
        return [given]
    stops = [_only_of(decode.stop.kind, given)] if asked_for else []
    for name in swept:
        kind = STOP_OF[name].name
        stops += [{**_only_of(kind, given), "kind": kind, name: value} for value in sweep[name]]
    return stops


def _only_of(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings that this kind of stop policy has a use for."""
    known = {"kind", *STOPS[kind].settings}
    return {name: value for name, value in given.items() if name in known}


def _verifiers(decode: DecodeConfig, sweep: Mapping[str, Sequence[Value]]) -> list[dict[str, Any]]:
    """Each rule with a swept setting at all combinations of its own, behind the verifier asked for,
    unless that is one of them."""
    given = decode.verifier.model_dump(exclude_unset=True)
    found = []
    for rule in dict.fromkeys(RULE_OF[name] for name in RULE_OF if name in sweep):
        names = [setting.name for setting in rule.settings]
        tried = [sweep.get(name, [getattr(decode.verifier, name)]) for name in names]
        found += [
            {"kind": rule.name, **dict(zip(names, values, strict=True))}
            for values in product(*tried)
        ]
        given = {name: value for name, value in given.items() if name not in names}
    asked_for = decode.verifier.kind not in [one["kind"] for one in found]
    return [given, *found] if asked_for else found


def parse_sweep(texts: Sequence[str]) -> dict[str, list[Value]]:
    """`k=5,10` and `tau=1,2` as {"k": [5, 10], "tau": [1, 2]}, for the command line."""
    sweep: dict[str, list[Value]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        try:
            found = [value if name in WORDS else float(value) for value in values.split(",")]
        except ValueError:
            found = []
        if not separator or not found:
            raise ConfigError(f"sweep {text!r} is not NAME=VALUE,VALUE; write for example k=5,10")
        sweep[name] = found
    return sweep


def _check(name: str, values: Sequence[Value]) -> None:
    if name not in SWEEPABLE:
        near = difflib.get_close_matches(name, SWEEPABLE, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SWEEPABLE)}"
        raise ConfigError(f"sweep over {name!r} is not possible; {hint}")
    if not values:
        raise ConfigError(f"sweep over {name!r} has no values; write for example {name}=1,2")


def _with_parts(
    decode: DecodeConfig, stop: Mapping[str, Any], verifier: Mapping[str, Any]
) -> DecodeConfig:
    values = decode.model_dump(exclude_unset=True)
    parts = {"stop": stop, "verifier": verifier}
    values |= {name: dict(part) for name, part in parts.items() if part or name in values}
    try:
        return DecodeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"sweep value {first['loc'][-1]}={first['input']!r}: {first['msg']}"
        ) from None
