"""What `drafttrain tune-cascade` found, as JSON: its schema, made from a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from drafttrain.decoding.types import Output
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    draw_resamples,
    estimate_quotient,
    estimate_ratio,
)
from drafttrain.evaluation.cascades.candidates import Candidate, Origin
from drafttrain.evaluation.cascades.search import Rung, Searched, swi
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.metrics import count_rounds, mean_acceptance_length
from drafttrain.evaluation.report import DataFacts, Part, TargetFacts


class CandidateResult(Part):
    """One matrix of increments, with what it did on the prompts that it saw: the first ones."""

    name: str
    """The increments as they are written on the command line, and the leniency above 1."""
    origin: Origin
    increments: list[list[int]]
    leniency: float
    prompts: int
    metrics: dict[str, Estimate]
    """swi and mean_acceptance_length; of those that saw all prompts regret, the share of the best
    SWI that is missing."""
    tokens: int
    target_calls: int
    calls: dict[str, int]
    """Of each level, by its name."""


class ReplayedCalls(Part):
    """Calls of a model: how many decoding asked for, and how many had to be made."""

    asked: int
    made: int


class CascadeReport(Part):
    """The increments chosen, what the choice rests on, and every candidate."""

    target: TargetFacts
    levels: dict[str, str]
    """Path of each drafter, the largest first, by the name that its calls are counted under."""
    sampling: dict[str, float]
    max_new_tokens: int
    costs: dict[str, float]
    """A call of each level, in target calls."""
    costs_from: Literal["measured", "parameters"]
    timing_prompts: int
    """Prompts on which costs were measured; 0: they are not measured."""
    data: DataFacts
    rungs: list[Rung]
    """Successive halving; the last one is the neighbours of the best, where they were tried."""
    candidates: list[CandidateResult]
    """The most prompts first, then the highest SWI."""
    best: str
    default: str
    first_alone: str
    """The first level alone, at the best length that was tried."""
    reported_data: DataFacts | None
    """None: no report_data."""
    reported: list[CandidateResult]
    """The best, the default and the first level alone on report_data, which chose nothing."""
    replayed: dict[str, ReplayedCalls]
    """By model; `target` is the target."""
    seconds: float
    """Wall clock of the search, without measuring costs."""
    environment: Environment

    def find(self, name: str) -> CandidateResult:
        """The candidate of that name. Raises ValueError for one that was not tried."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise ValueError(f"increments {name!r} were not tried; {self.best!r} are the best")


def results(
    searched: Searched, costs: Mapping[str, float], bootstrap: int
) -> list[CandidateResult]:
    """All candidates: the most prompts first, then the highest SWI."""
    most = max(map(len, searched.outputs.values()))
    against = searched.outputs[searched.best]
    found = [
        summarise(one, outputs, costs, bootstrap, against if len(outputs) == most else None)
        for one, outputs in searched.outputs.items()
    ]
    found.sort(key=lambda result: (-result.prompts, -result.metrics["swi"].value))
    return found


def summarise(
    candidate: Candidate,
    outputs: Sequence[Output],
    costs: Mapping[str, float],
    bootstrap: int,
    best: Sequence[Output] | None = None,
) -> CandidateResult:
    """A candidate's figures; with the best's outputs on the same prompts, its regret too."""
    counts = count_rounds(outputs)
    resamples = draw_resamples(len(outputs), bootstrap)
    metrics = {
        "swi": estimate_ratio(swi(outputs, costs), resamples),
        "mean_acceptance_length": estimate_ratio(mean_acceptance_length(counts), resamples),
    }
    if best is not None:
        metrics["regret"] = regret(outputs, best, costs, resamples)
    return CandidateResult(
        name=candidate.name,
        origin=candidate.origin,
        increments=[list(row) for row in candidate.increments],
        leniency=candidate.leniency,
        prompts=len(outputs),
        metrics={name: found for name, found in metrics.items() if found is not None},
        tokens=int(counts.tokens.sum()),
        target_calls=int(counts.rounds.sum()),
        calls={name: int(calls.sum()) for name, calls in counts.calls.items()},
    )


def regret(
    outputs: Sequence[Output],
    best: Sequence[Output],
    costs: Mapping[str, float],
    resamples: Array,
) -> Estimate | None:
    """1 - SWI / SWI of the best, both resampled with the same prompts."""
    share = estimate_quotient(swi(outputs, costs), swi(best, costs), resamples)
    if share is None:
        return None
    value, low, high = 1.0 - np.array([share.value, share.high, share.low])
    return Estimate(float(value), float(low), float(high))
