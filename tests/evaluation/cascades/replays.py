"""Replays of tiny cascades, and of toy candidates whose worth is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from drafttrain.decoding.drafters.cascade import Level
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.engine.cached_model import CachedModel, make_source
from drafttrain.decoding.types import Calls, Output, Round, Sampling
from drafttrain.evaluation.cascades.candidates import Candidate
from drafttrain.evaluation.cascades.search import CascadeReplay
from drafttrain.evaluation.runner import Prompt
from tests.tiny_drafters import noisy
from tests.tiny_models import tiny_model

NEW_TOKENS = 16


@cache
def target_of(family: str) -> CachedModel:
    return CachedModel(tiny_model(family))


@cache
def levels_of(family: str) -> list[Level]:
    """Two language models that are often right, and Max-Gram."""
    model = target_of(family).model
    models = [CachedModel(noisy(model, family, scale)) for scale in (0.1, 0.3)]
    drafters = [*map(CausalDrafter, models), MaxGramDrafter()]
    return [Level(f"level {i}", drafter) for i, drafter in enumerate(drafters)]


def prompts_of(family: str) -> list[Prompt]:
    texts = [[5, 9, 5, 9, 5, 1], [12, 7, 30, 1], [21, 22, 23, 21, 22, 1]]
    model = target_of(family).model
    return [Prompt(i, "", None, make_source(ids, model)) for i, ids in enumerate(texts)]


def replay_of(family: str, sampling: Sampling) -> CascadeReplay:
    target, levels = target_of(family), levels_of(family)
    return CascadeReplay(target, levels, sampling, NEW_TOKENS, seed=3)


def facts(output: Output) -> list[tuple]:
    """Rounds without their clocks."""
    return [
        (
            list(played.drafted),
            list(played.path),
            list(played.emitted),
            played.passes,
            {name: calls.count for name, calls in (played.calls or {}).items()},
        )
        for played in output.rounds
    ]


def toy(length: int) -> Candidate:
    origin = {1: "default", 2: "first level alone", 3: "first level alone"}.get(length, "random")
    return Candidate(((length,),), origin=origin)


class ToyReplay:
    """A candidate of length n emits n tokens a round, whatever the prompt."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        """Prompt, and how many candidates saw it."""

    def __call__(self, prompt: int, candidates: Sequence[Candidate]) -> list[Output]:
        self.seen.append((prompt, len(candidates)))
        return [
            Output(rounds=[Round(0, [], [], [7] * one.longest, calls={"toy": Calls(1, 0.0)})])
            for one in candidates
        ]
