"""Sweeps: one method setting becomes several (SpecDec Tables 3 and 4, SpecDec++ Figure 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal

from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.methods import RULES, STOPS
from drafttrain.config.reading import validate_settings

STOP_OF = {stop.varied: stop for stop in STOPS.values()}
"""Setting of a stop policy that can be swept -> the policy that goes by it."""
RULE_OF = {name: rule for rule in RULES.values() for name in rule.settings}
"""The same of verifiers."""
SWEEPABLE = (*STOP_OF, *RULE_OF)
Swept = Literal[SWEEPABLE]
Sweep = Mapping[str, Sequence[float]]


def check_sweep(values: Mapping[str, Any]) -> None:
    """Refuse settings of a stop or verifier, as the user gave them, that a sweep leaves unread.

    values: of `eval`, before a run fills in what it knows. Raises ConfigError.
    """
    sweep, decode = values.get("sweep") or {}, values.get("decode") or {}
    for group, kinds, swept in (("stop", STOPS, STOP_OF), ("verifier", RULES, RULE_OF)):
        given = decode.get(group) or {}
        used = [swept[name] for name in sweep if name in swept]
        used += [kinds[given["kind"]]] if used and given.get("kind") in kinds else []
        read = {name for kind in used for name in kind.settings} - {*sweep}
        if used and (unread := sorted(given.keys() - {"kind", *read})):
            name = unread[0]
            raise ConfigError(
                f"decode.{group}.{name} = {given[name]!r} is not read where {', '.join(sweep)} is "
                "swept; leave it out, or sweep what reads it"
            )


def expand_sweep(decode: DecodeConfig, sweep: Sweep) -> list[DecodeConfig]:
    """The methods that a sweep asks for, each once; without a sweep the method itself.

    Every k, h, entropy, delta, ... is a stop policy of that kind; the one asked for by `stop.kind`
    comes first, if it was given and is of another kind. All are measured with the verifier asked
    for, and with each other rule that has a swept setting, at all combinations of its own.
    Raises ConfigError naming the setting for values out of range.
    """
    given = decode.model_dump(exclude_unset=True)  # what was not given stays not given
    methods = []
    for stop, verifier in product(_stops(decode, sweep), _verifiers(decode, sweep)):
        parts = {"stop": stop, "verifier": verifier}
        values = given | {name: part for name, part in parts.items() if part or name in given}
        methods.append(validate_settings(DecodeConfig, values, within="decode"))
    return [method for n, method in enumerate(methods) if method not in methods[:n]]


def _stops(decode: DecodeConfig, sweep: Sweep) -> list[dict[str, Any]]:
    """Settings of each stop policy, without those that belong to another kind alone."""
    given = decode.stop.model_dump(exclude_unset=True)
    swept = [{"kind": STOP_OF[n].name, n: value} for n in STOP_OF for value in sweep.get(n, ())]
    if not swept:
        return [given]
    asked_for = "kind" in given and decode.stop.kind not in {one["kind"] for one in swept}
    stops = [{"kind": decode.stop.kind}, *swept] if asked_for else swept
    return [
        {name: given[name] for name in STOPS[stop["kind"]].settings if name in given} | stop
        for stop in stops
    ]


def _verifiers(decode: DecodeConfig, sweep: Sweep) -> list[dict[str, Any]]:
    """The verifier asked for, then each rule with a swept setting at every combination."""
    given = decode.verifier.model_dump(exclude_unset=True)
    found = []
    for rule in dict.fromkeys(RULE_OF[name] for name in RULE_OF if name in sweep):
        names = rule.settings
        tried = product(*(sweep.get(name, [getattr(decode.verifier, name)]) for name in names))
        found += [{"kind": rule.name, **dict(zip(names, values, strict=True))} for values in tried]
        given = {name: value for name, value in given.items() if name not in names}
    asked_for = decode.verifier.kind not in {one["kind"] for one in found}
    return [given, *found] if asked_for else found
