"""Successive halving: all candidates on a few prompts, the better half on twice as many.

Prompts are taken one after another and each by all candidates that are left, so that the rows of
one prompt only are held in memory. The order of prompts and candidates is all that the outcome
depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drafttrain.config.progress import tracked, tracking
from drafttrain.evaluation.played.candidates import Played
from drafttrain.evaluation.stops.replay import PolicyCounts

Play = Callable[[int, Sequence[Played]], list[PolicyCounts]]
"""What each candidate spends on prompt number i, [1, 1] each."""
Rank = Callable[[Mapping[Played, PolicyCounts]], list[list[Played]]]
"""Candidates by falling worth; several orders where there are several uses."""


@dataclass(frozen=True)
class Rung:
    """So many candidates saw all prompts up to this number."""

    prompts: int
    candidates: int


@dataclass(frozen=True)
class Halving:
    """How many prompts the first rung has, and how many candidates are left in the end at least."""

    first: int = 8
    finalists: int = 4


@dataclass(frozen=True)
class Searched:
    """What every candidate spent on the prompts that it saw, the first ones."""

    counts: Mapping[Played, list[PolicyCounts]]
    rungs: list[Rung]

    @property
    def finished(self) -> dict[Played, PolicyCounts]:
        """Those that saw all prompts, with their counts, [P, 1] each."""
        most = max(map(len, self.counts.values()), default=0)
        return {
            one: PolicyCounts.stack(own) for one, own in self.counts.items() if len(own) == most
        }

    @property
    def dropped(self) -> dict[str, int]:
        """The names of the others, with how many prompts they saw."""
        finished = self.finished
        return {one.name: len(own) for one, own in self.counts.items() if one not in finished}


def halve(
    candidates: Sequence[Played],
    prompts: int,
    play: Play,
    rank: Rank,
    halving: Halving,
    progress: bool = False,
) -> Searched:
    """Who is among the better half of some order goes on, until the finalists see all prompts."""
    counts: dict[Played, list[PolicyCounts]] = {one: [] for one in candidates}
    alive, rungs, seen, upto = list(candidates), [], 0, min(halving.first, prompts)
    with tracking(prompts if alive else 0, "play", "input", shown=progress) as work:
        while alive:
            work.set_postfix_str(f"{len(alive)} candidates", refresh=False)
            for prompt in range(seen, upto):
                _collect(counts, alive, play(prompt, alive))
                work.update()
            seen = upto
            rungs.append(Rung(seen, len(alive)))
            if seen == prompts:
                break
            orders = rank({one: PolicyCounts.stack(counts[one]) for one in alive})
            alive = _better(alive, orders, max(halving.finalists, (len(alive) + 1) // 2))
            upto = min(2 * seen, prompts) if len(alive) > halving.finalists else prompts
    return Searched(counts, rungs)


def play_also(
    searched: Searched, more: Sequence[Played], prompts: int, play: Play, progress: bool = False
) -> Searched:
    """More candidates on all prompts."""
    finished = searched.finished
    fresh = [one for one in more if one not in finished]
    if not fresh:
        return searched
    counts = {**searched.counts, **{one: [] for one in fresh}}
    for prompt in tracked(range(prompts), "play neighbours", "input", shown=progress):
        _collect(counts, fresh, play(prompt, fresh))
    return Searched(counts, [*searched.rungs, Rung(prompts, len(fresh))])


def _collect(
    counts: Mapping[Played, list[PolicyCounts]],
    candidates: Sequence[Played],
    found: Sequence[PolicyCounts],
) -> None:
    for candidate, own in zip(candidates, found, strict=True):
        counts[candidate].append(own)


def _better(
    alive: Sequence[Played], orders: Sequence[Sequence[Played]], count: int
) -> list[Played]:
    """Those among the first so many of some order."""
    kept = {one for order in orders for one in order[:count]}
    return [one for one in alive if one in kept]
