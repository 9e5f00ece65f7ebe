"""Sweeps: one method setting becomes several (SpecDec Tables 3 and 4)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from drafttrain.config import ConfigError, DecodeConfig

SWEEPABLE = {"k": "stop", "beta": "verifier", "tau": "verifier"}
"""Setting that can be swept -> the part of DecodeConfig it belongs to."""


def expand_sweep(decode: DecodeConfig, sweep: Mapping[str, Sequence[float]]) -> list[DecodeConfig]:
    """The methods that a sweep asks for, each once.

    Every k is measured with the verifier asked for; beta and tau add Spec-Verification at each of
    their pairs. Without a sweep: the method itself. Raises ConfigError naming the setting for
    unknown names, no values, and values out of range.
    """
    for name, values in sweep.items():
        _check(name, values)
    lengths = sweep.get("k", [decode.stop.k])
    pairs: list[dict[str, float]] = [{}]
    if "beta" in sweep or "tau" in sweep:
        betas = sweep.get("beta", [decode.verifier.beta])
        taus = sweep.get("tau", [decode.verifier.tau])
        pairs += [{"beta": beta, "tau": tau} for beta in betas for tau in taus]
    points = [{"k": k, **pair} for k in lengths for pair in pairs]
    methods = []
    for point in points:
        method = _with_values(decode, point)
        if method not in methods:
            methods.append(method)
    return methods


def parse_sweep(texts: Sequence[str]) -> dict[str, list[float]]:
    """`k=5,10` and `tau=1,2` as {"k": [5, 10], "tau": [1, 2]}, for the command line."""
    sweep: dict[str, list[float]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        try:
            numbers = [float(value) for value in values.split(",")]
        except ValueError:
            numbers = []
        if not separator or not numbers:
            raise ConfigError(f"sweep {text!r} is not NAME=VALUE,VALUE; write for example k=5,10")
        sweep[name] = numbers
    return sweep


def _check(name: str, values: Sequence[float]) -> None:
    if name not in SWEEPABLE:
        near = difflib.get_close_matches(name, SWEEPABLE, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SWEEPABLE)}"
        raise ConfigError(f"sweep over {name!r} is not possible; {hint}")
    if not values:
        raise ConfigError(f"sweep over {name!r} has no values; write for example {name}=1,2")


def _with_values(decode: DecodeConfig, point: Mapping[str, float]) -> DecodeConfig:
    values = decode.model_dump(exclude_unset=True)  # what the user did not give stays not given
    for name, value in point.items():
        part = values.setdefault(SWEEPABLE[name], {})
        part[name] = value
        if SWEEPABLE[name] == "verifier":
            part["kind"] = "spec-verification"
    try:
        return DecodeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"sweep value {first['loc'][-1]}={first['input']!r}: {first['msg']}"
        ) from None
