"""Trees of each method at a depth or a budget (RSD, Jeon et al. 2024, Exp1 and Exp2).

A method at a depth or a budget has several trees, all of the paper's Appendix C.3. A budget is the
number of draft tokens per round, which the target scores in one call; all trees of a budget have
exactly that many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.methods import TREES

METHODS = ("sd", "spectr", "specinfer", "rsd-c", "rsd-s")
"""sd is a chain, a tree of width one."""
BEAMS_AT_DEPTH = {2: (2, 3), 3: (3, 4), 4: (5, 7), 5: (6, 12)}
"""Depth -> paths of SpecTr and SpecInfer, beams of RSD-S (Appendix C.3.1)."""
BRANCHINGS_AT_DEPTH = {
    2: ((2, 2), (2, 1), (3, 1)),
    3: ((2, 2, 2), (3, 1, 1), (4, 1, 1)),
    4: ((2, 2, 2, 2), (5, 1, 1, 1), (7, 1, 1, 1)),
    5: ((2, 2, 2, 2, 2), (6, 1, 1, 1, 1), (12, 1, 1, 1, 1)),
}
BEAMS_AT_BUDGET = {
    6: ((2, 3), (3, 2)),
    10: ((2, 5), (5, 2)),
    14: ((2, 7), (7, 2)),
    21: ((3, 7), (7, 3)),
    30: ((5, 6), (6, 5)),
}
"""Budget -> (paths or beams, depth) (Appendix C.3.2)."""
BRANCHINGS_AT_BUDGET = {
    6: ((2, 1, 1), (2, 2), (3, 1)),
    10: ((2, 1, 1, 1, 1), (2, 2, 1), (5, 1)),
    14: ((2, 1, 1, 1, 1, 1, 1), (2, 2, 2), (7, 1)),
    21: ((3, 1, 1, 1, 1, 1, 1), (3, 2, 2), (7, 1, 1)),
    30: ((2, 2, 2, 2), (5, 1, 1, 1, 1, 1), (6, 1, 1, 1, 1)),
}

Parts = dict[str, dict[str, Any]]
"""Settings of tree, stop and verifier that a method sets."""


def expand_methods(
    decode: DecodeConfig,
    methods: Sequence[str],
    depths: Sequence[int],
    budgets: Sequence[int],
) -> list[DecodeConfig]:
    """Returns settings for each method at each depth and budget, each tree once.

    Drafter and sampling come from `decode`; so do the companion drafters for specinfer, and
    draft_temperature for trees that have one. Raises ConfigError for unknown methods, for methods
    without depths and budgets or the reverse, for a depth or budget without trees of a method, and
    for settings of a single tree.
    """
    if not (methods and (depths or budgets)):
        given = "methods" if methods else "depth/budget" if depths or budgets else "nothing"
        missing = "depth or budget" if methods else "methods"
        raise ConfigError(
            f"{given} given without {missing}; write for example --methods sd,spectr,rsd-s "
            "--depth 2,3,4,5"
        )
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ConfigError(f"method {unknown[0]!r} is not known; use {', '.join(METHODS)}")
    _check_shared(decode)
    configs: list[DecodeConfig] = []
    for method in methods:
        sizes = [("depth", depth) for depth in depths] + [("budget", b) for b in budgets]
        for axis, value in sizes:
            for parts in _trees(decode, method, axis, value):
                config = _with_parts(decode, parts)
                if config not in configs:
                    configs.append(config)
    return configs


def _check_shared(decode: DecodeConfig) -> None:
    """Refuses settings that each method sets itself. Raises ConfigError."""
    chosen = [f"tree.{name}" for name in ("kind", "width", "branching", "nodes")]
    chosen += ["stop.k", "stop.kind"]
    for name in chosen:
        group, _, field = name.partition(".")
        settings = getattr(decode, group)
        if field in settings.model_fields_set:
            raise ConfigError(
                f"{name} = {getattr(settings, field)!r} sets one tree, but methods set their own "
                "trees; leave it out, or leave methods out"
            )


def _trees(decode: DecodeConfig, method: str, axis: str, value: int) -> Iterator[Parts]:
    if method == "sd":
        yield _parts("none", value)
    elif method in ("spectr", "specinfer", "rsd-s"):
        yield from _beams(decode, method, axis, value)
    else:
        table = BRANCHINGS_AT_DEPTH if axis == "depth" else BRANCHINGS_AT_BUDGET
        for branching in _look_up(table, method, axis, value):
            yield _parts("rsd-c", len(branching), branching=branching)


def _beams(decode: DecodeConfig, method: str, axis: str, value: int) -> Iterator[Parts]:
    if axis == "depth":
        pairs = [(width, value) for width in _look_up(BEAMS_AT_DEPTH, method, axis, value)]
    else:
        pairs = list(_look_up(BEAMS_AT_BUDGET, method, axis, value))
    if method == "specinfer" and decode.tree.drafters:
        yield from _split_paths(decode.tree.drafters, pairs, f"{axis} = {value}")
        return
    for width, depth in pairs:
        if method == "rsd-s":
            yield _parts("rsd-s", depth, width=width)
        else:
            verifier = "k-seq" if method == "spectr" else "multi-round"
            yield _parts("paths", depth, verifier, width=width)


def _split_paths(
    companions: tuple[str, ...], pairs: Sequence[tuple[int, int]], where: str
) -> Iterator[Parts]:
    """Splits the paths of one drafter evenly among several drafters. Raises ConfigError."""
    drafters = 1 + len(companions)
    divisible = [(width, depth) for width, depth in pairs if width % drafters == 0]
    if not divisible:
        raise ConfigError(
            f"{where}: {drafters} drafters cannot share {' or '.join(str(w) for w, _ in pairs)} "
            "paths evenly; leave it out for specinfer, or leave tree.drafters out"
        )
    for width, depth in divisible:
        each = width // drafters
        yield _parts("paths", depth, "multi-round", width=each, drafters=companions)


def _parts(kind: str, depth: int, verifier: str | None = None, **tree: Any) -> Parts:
    parts: Parts = {"tree": {"kind": kind, **tree}, "stop": {"kind": "fixed", "k": depth}}
    return parts if verifier is None else parts | {"verifier": {"kind": verifier}}


def _look_up(table: Mapping[int, tuple], method: str, axis: str, value: int) -> tuple:
    if value not in table:
        known = ", ".join(map(str, table))
        raise ConfigError(
            f"{axis} = {value}: the RSD paper has no {method} trees of this {axis}; use {known}, "
            "or measure one tree with decode.tree"
        )
    return table[value]


def _with_parts(decode: DecodeConfig, parts: Parts) -> DecodeConfig:
    """Sets the method's parts in `decode`; at temperature 0 the verifier is always greedy match."""
    values = decode.model_dump(exclude_unset=True)
    tree = parts["tree"]
    if decode.tree.draft_temperature is not None:
        if "draft_temperature" in TREES[tree["kind"]].settings:
            tree["draft_temperature"] = decode.tree.draft_temperature
    values |= {"tree": tree, "stop": parts["stop"]}
    if "verifier" in parts and decode.sampling.temperature > 0:
        values["verifier"] = parts["verifier"]
    return DecodeConfig.model_validate(values)
