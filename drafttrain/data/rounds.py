"""Rounds of decoding as `drafttrain generate --json` and samples.jsonl of `drafttrain eval` have
them, read back: what was emitted, and where drafts were rejected."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError, model_validator

from drafttrain.config.base import ConfigError
from drafttrain.config.language_recipes import ReplayConfig
from drafttrain.config.reading import first_problem

Tokens = list[int] | list[str | None]
"""Ids, or pieces of text (null of an id without one)."""
REMEDY = (
    "give what `drafttrain generate --json` wrote with a drafter, or samples.jsonl of `drafttrain "
    "eval`"
)


class TracedRound(BaseModel):
    """A round as it is written."""

    drafted: Tokens
    accepted: NonNegativeInt
    path: list[NonNegativeInt] | None = None
    """Of a tree: the drafted tokens that were accepted."""
    emitted: Tokens = Field(min_length=1)

    @model_validator(mode="after")
    def _adds_up(self) -> TracedRound:
        accepted, emitted = self.accepted, len(self.emitted)
        if not max(accepted, 1) <= emitted <= accepted + 1 or accepted > len(self.drafted):
            raise ValueError(
                f"{accepted} accepted of {len(self.drafted)} drafted tokens do not make {emitted}"
            )
        if self.path is None and self.drafted[:accepted] != self.emitted[:accepted]:
            raise ValueError("what was accepted is not what was emitted")
        return self

    @property
    def rejected(self) -> bool:
        """Whether the target put a token of its own in the place of a drafted one. A draft that is
        cut at the end of the output was not rejected."""
        return self.accepted < min(len(self.drafted), len(self.emitted))


class _Method(BaseModel):
    rounds: list[TracedRound] = []
    """None of Transformers' own decoding."""


class _Line(BaseModel):
    row: NonNegativeInt
    temperature: float = 0.0
    """Not in files of earlier versions."""
    rounds: list[TracedRound] = []
    """Of generate."""
    outputs: dict[str, _Method] = {}
    """Of eval, by method."""


@dataclass(frozen=True)
class TracedRow:
    """What became of one prompt."""

    line: int
    """Of the file, from 1."""
    tokens: Sequence[int | str | None]
    """The output."""
    rejected: Sequence[int]
    """Places in the output at which a draft was rejected, in rising order."""

    @property
    def as_pieces(self) -> bool:
        return not isinstance(self.tokens[0], int)


@dataclass(frozen=True)
class Traces:
    """A file of rounds."""

    path: Path
    rows: dict[int, TracedRow]
    """By the prompt's number in its own file."""
    sha256: str
    """Of the file."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"replay.path = {str(self.path)!r}"

    @property
    def rejected(self) -> int:
        return sum(len(row.rejected) for row in self.rows.values())

    def __str__(self) -> str:
        tokens = sum(len(row.tokens) for row in self.rows.values())
        return (
            f"{self.path}: {self.rejected:,} rejected drafts along {tokens:,} tokens of "
            f"{len(self.rows):,} rows"
        )


def read_traces(settings: ReplayConfig) -> Traces:
    """Rounds of greedy decoding, by row. Raises ConfigError for a file that is missing, broken or
    empty, rows that come twice, are sampled, without rounds or drafted in trees, and where several
    methods have rounds and none of them is named."""
    assert settings.path is not None
    path, name = settings.path, f"replay.path = {str(settings.path)!r}"
    if not path.is_file():
        raise ConfigError(f"{name} is no file; {REMEDY}")
    content = path.read_bytes()
    rows: dict[int, TracedRow] = {}
    for number, text in enumerate(content.splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = _Line.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"{name}, line {number}: {first_problem(error)}; {REMEDY}") from None
        if line.row in rows:
            raise ConfigError(
                f"{name}: row {line.row} is in line {rows[line.row].line} and again in line "
                f"{number}; leave one of them out"
            )
        place = f"{name}, line {number} (row {line.row})"
        rows[line.row] = traced_row(number, _rounds(line, settings.method, place))
    if not rows:
        raise ConfigError(f"{name} is empty; {REMEDY}")
    return Traces(path, rows, hashlib.sha256(content).hexdigest())


def traced_row(line: int, rounds: Sequence[TracedRound]) -> TracedRow:
    """What was emitted, and the places of the tokens that came for rejected ones."""
    tokens: list[int | str | None] = []
    rejected = []
    for one in rounds:
        if one.rejected:
            rejected.append(len(tokens) + one.accepted)
        tokens += one.emitted
    return TracedRow(line, tokens, rejected)


def _rounds(line: _Line, method: str | None, place: str) -> list[TracedRound]:
    """The rounds that are asked for; `place` is what messages call the line."""
    if line.temperature:
        raise ConfigError(
            f"{place}: it was decoded with temperature = {line.temperature:g}; trace greedily "
            "(temperature 0): a sampled token says nothing about the target's likeliest one"
        )
    named = {name: one.rounds for name, one in line.outputs.items() if one.rounds}
    rounds = line.rounds
    if rounds and method is not None:
        raise ConfigError(
            f"{place}: replay.method = {method!r}, but there are the rounds of one method alone, "
            "without a name; leave replay.method out"
        )
    if not rounds:
        if not named:
            raise ConfigError(f"{place}: there are no rounds; {REMEDY}")
        chosen = next(iter(named)) if method is None and len(named) == 1 else method
        if chosen not in named:
            names = ", ".join(repr(name) for name in named)
            raise ConfigError(f"{place}: replay.method = {method!r}; give one of {names}")
        rounds = named[chosen]
    if any(one.path is not None for one in rounds):
        raise ConfigError(
            f"{place}: drafts are trees, in which no single token was rejected; trace a method "
            "that drafts chains"
        )
    return rounds
