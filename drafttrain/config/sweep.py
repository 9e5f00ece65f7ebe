"""Sweeps: measure a method at several values (SpecDec Tables 3 and 4, SpecDec++ Figure 4)."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal

from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.methods import RULES, STOPS
from drafttrain.config.reading import validate_settings

STOP_OF = {stop.varied: stop for stop in STOPS.values()}
"""Settings of stop policies that can be swept -> the policy that uses it."""
RULE_OF = {name: rule for rule in RULES.values() for name in rule.settings}
"""Settings of verifiers that can be swept -> the verifier that uses it."""
SWEEPABLE = (*STOP_OF, *RULE_OF)
Swept = Literal[SWEEPABLE]
Sweep = Mapping[str, Sequence[float]]


def check_sweep(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a given setting of stop or verifier that the sweep leaves without use.

    values: the settings of `eval` that the user gave.
    """
    sweep, decode = values.get("sweep") or {}, values.get("decode") or {}
    for group, kinds, swept in (("stop", STOPS, STOP_OF), ("verifier", RULES, RULE_OF)):
        given = decode.get(group) or {}
        used = [swept[name] for name in sweep if name in swept]
        used += [kinds[given["kind"]]] if used and given.get("kind") in kinds else []
        read = {name for kind in used for name in kind.settings} - {*sweep}
        if used and (unread := sorted(given.keys() - {"kind", *read})):
            raise ConfigError(
                f"decode.{group}.{unread[0]} = {given[unread[0]]!r} is not used by a sweep of "
                f"{', '.join(sweep)}; leave it out, or sweep the setting of a method that uses it"
            )


def expand_sweep(decode: DecodeConfig, sweep: Sweep) -> list[DecodeConfig]:
    """Returns the methods of a sweep without duplicates; without a sweep the method itself.

    Each value of k, h, entropy, delta, ... gives a stop policy of that kind. The policy of
    `stop.kind` comes first if it was given and is of another kind. Each policy is combined with the
    given verifier and with every verifier that has swept settings, at all combinations of those.
    Raises ConfigError naming the setting for values out of range.
    """
    given = decode.model_dump(exclude_unset=True)  # without defaults
    methods = []
    for stop, verifier in product(_stops(decode, sweep), _verifiers(decode, sweep)):
        parts = {"stop": stop, "verifier": verifier}
        values = given | {name: part for name, part in parts.items() if part or name in given}
        methods.append(validate_settings(DecodeConfig, values, within="decode"))
    return [method for n, method in enumerate(methods) if method not in methods[:n]]


def _stops(decode: DecodeConfig, sweep: Sweep) -> list[dict[str, Any]]:
    """Returns the settings of each stop policy, without those of other kinds only."""
    given = decode.stop.model_dump(exclude_unset=True)
    swept = [{"kind": STOP_OF[n].name, n: value} for n in STOP_OF for value in sweep.get(n, ())]
    if not swept:
        return [given]
    separate = "kind" in given and decode.stop.kind not in {stop["kind"] for stop in swept}
    stops = [{"kind": decode.stop.kind}, *swept] if separate else swept
    return [
        {name: given[name] for name in STOPS[stop["kind"]].settings if name in given} | stop
        for stop in stops
    ]


def _verifiers(decode: DecodeConfig, sweep: Sweep) -> list[dict[str, Any]]:
    """Returns the given verifier, then each verifier with swept settings at every combination."""
    given = decode.verifier.model_dump(exclude_unset=True)
    swept = []
    for rule in dict.fromkeys(RULE_OF[name] for name in RULE_OF if name in sweep):
        names = rule.settings
        tried = product(*(sweep.get(name, [getattr(decode.verifier, name)]) for name in names))
        swept += [{"kind": rule.name, **dict(zip(names, values, strict=True))} for values in tried]
        given = {name: value for name, value in given.items() if name not in names}
    separate = decode.verifier.kind not in {verifier["kind"] for verifier in swept}
    return [given, *swept] if separate else swept
