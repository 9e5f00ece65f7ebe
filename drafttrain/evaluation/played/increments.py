"""Matrices of increments to try for a cascade: the usual ones, and random ones.

What the first level drafts alone is a chain of its own, with no cascade.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from drafttrain.config.kinds import copies_text
from drafttrain.decoding.drafters.cascade import show_increments
from drafttrain.models.drafters import read_kind

LevelKind = Literal["model", "block", "max-gram"]
"""What a level is: a language model, which can review; a drafter of blocks; max-gram."""
Matrix = tuple[tuple[int, ...], ...]

ALONE: dict[LevelKind, int] = {"model": 5, "block": 5, "max-gram": 10}
"""Tokens that the last level drafts alone."""
MOST: dict[LevelKind, tuple[int, int]] = {"model": (8, 8), "block": (8, 8), "max-gram": (10, 16)}
"""Largest random increment of a kind of level in a round, and in reviews."""
ZERO = 1 / 3
"""Share of random increments that are 0."""
STEPS = (-2, -1, 1, 2)
"""How far neighbours go from the best in one increment."""
MOST_DRAWS = 50
"""Random matrices drawn for each that is wanted, before giving up on new ones."""


@dataclass(frozen=True)
class Increments:
    """The matrix K of a cascade, with a leniency."""

    increments: Matrix
    leniency: float = 1.0

    @property
    def name(self) -> str:
        lenient = f" l={self.leniency:g}" if self.leniency > 1 else ""
        return f"{show_increments(self.increments)}{lenient}"

    @property
    def longest(self) -> int:
        """Tokens of a round."""
        return sum(self.increments[0])


def kind_of(drafter: str) -> LevelKind:
    """What the drafter that settings name is in a cascade. Raises ConfigError as `read_kind`."""
    if copies_text(drafter):
        return "max-gram"
    return "model" if read_kind(drafter).is_language_model else "block"


def simplify(candidate: Increments, kinds: Sequence[LevelKind]) -> Increments:
    """The least matrix that drafts the same, so that equal ones are found.

    Increments that nothing asks for become 0: those of reviews below a level that drafts nothing or
    cannot review. A review adds a token of its own, so in one that drafts n tokens those behind it
    have room for n - 1 (where all draft as much as they are asked for). Leniency that counts for
    nothing becomes 1.
    """
    rows, levels = candidate.increments, len(kinds)
    used = [[0] * len(row) for row in rows]
    reviewed: set[LevelKind] = set()

    def visit(depth: int, first: int, room: int) -> None:
        for level in range(first, levels):
            asked = min(rows[depth][level - depth], room)
            if asked == 0:
                continue
            room -= asked
            used[depth][level - depth] = max(used[depth][level - depth], asked)
            if depth > 0:
                reviewed.add(kinds[level])
            if kinds[level] == "model" and level + 1 < levels:
                visit(depth + 1, level + 1, asked - 1)

    visit(0, 0, candidate.longest)
    leniency = candidate.leniency if reviewed - {"max-gram"} else 1.0
    return replace(candidate, increments=tuple(map(tuple, used)), leniency=leniency)


def propose(
    kinds: Sequence[LevelKind],
    default: Matrix,
    leniencies: Sequence[float],
    count: int,
    seed: int,
) -> list[Increments]:
    """So many different candidates, fewer where there are no more: the default, the last level
    alone, then random matrices."""
    found: dict[Increments, None] = {}
    generator = np.random.default_rng(seed)
    for candidate in _usual(kinds, default, leniencies):
        found.setdefault(simplify(candidate, kinds))
    for _ in range(MOST_DRAWS * count):
        if len(found) >= count:
            break
        candidate = _random(kinds, leniencies, generator)
        if candidate.longest:
            found.setdefault(simplify(candidate, kinds))
    return list(found)[:count]


def neighbours(best: Increments, kinds: Sequence[LevelKind]) -> list[Increments]:
    """All that differ from it in one increment by one or two, in meaning too."""
    found = {}
    for candidate in _moved(best):
        if candidate.longest:
            found.setdefault(simplify(candidate, kinds))
    return [candidate for candidate in found if candidate != best]


def _usual(
    kinds: Sequence[LevelKind], default: Matrix, leniencies: Iterable[float]
) -> Iterator[Increments]:
    first, *others = leniencies
    yield Increments(default, first)
    rows = [[0] * (len(kinds) - depth) for depth in range(len(kinds))]
    rows[0][-1] = ALONE[kinds[-1]]
    yield Increments(tuple(map(tuple, rows)))
    for leniency in others:
        yield Increments(default, leniency)


def _random(
    kinds: Sequence[LevelKind], leniencies: Sequence[float], generator: np.random.Generator
) -> Increments:
    rows = []
    for depth in range(len(kinds)):
        row = []
        for kind in kinds[depth:]:
            zero, drawn = generator.random() < ZERO, generator.integers(MOST[kind][depth > 0])
            row.append(0 if zero else 1 + int(drawn))
        rows.append(tuple(row))
    return Increments(tuple(rows), float(generator.choice(np.asarray(leniencies))))


def _moved(best: Increments) -> Iterator[Increments]:
    for depth, row in enumerate(best.increments):
        for place, count in enumerate(row):
            for step in STEPS:
                if count + step < 0:
                    continue
                rows = [list(old) for old in best.increments]
                rows[depth][place] = count + step
                yield Increments(tuple(map(tuple, rows)), best.leniency)
