"""Tiny pairs, candidates of them, and toy candidates whose worth is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from drafttrain.build.drafters import make_drafter
from drafttrain.build.pairs import Pair
from drafttrain.config.decode import CascadeConfig, DecodeConfig, SamplingConfig, StopConfig
from drafttrain.config.decode import TreeConfig as Tree
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Output
from drafttrain.evaluation.played.candidates import Played
from drafttrain.evaluation.played.increments import Increments
from drafttrain.evaluation.played.player import Player
from drafttrain.evaluation.prompts import Prompt
from drafttrain.models.loading import LoadedTarget
from tests.tiny_drafters import noisy, shared, tiny_drafter
from tests.tiny_models import tiny_model
from tests.tiny_targets import tiny_tokenizer

NEW_TOKENS = 16
GREEDY = SamplingConfig(max_new_tokens=NEW_TOKENS, seed=3)
SAMPLED = SamplingConfig(temperature=1.0, top_k=20, max_new_tokens=NEW_TOKENS, seed=3)


@cache
def pair_of(family: str) -> Pair:
    """Two language models that are often right, and Max-Gram; of `slots` a Spec-Drafter."""
    model = shared("marian") if family == "slots" else tiny_model(family)
    target = LoadedTarget(model, tiny_tokenizer(), "target")
    if family == "slots":
        drafter = tiny_drafter("marian", decoder_layers=2)
        return Pair(target, make_drafter(drafter, model), drafter)
    first, second = (noisy(model, family, scale) for scale in (0.1, 0.3))
    return Pair(
        target,
        make_drafter(first),
        first,
        {"small": make_drafter(second), "max-gram": MaxGramDrafter()},
        {"small": second, "max-gram": None},
    )


@cache
def target_of(family: str) -> CachedModel:
    return CachedModel(pair_of(family).target.model)


def player_of(family: str, sampling: SamplingConfig = GREEDY) -> Player:
    return Player(target_of(family), pair_of(family), sampling)


def prompts_of(family: str) -> list[Prompt]:
    texts = [[5, 9, 5, 9, 5, 1], [12, 7, 30, 1], [21, 22, 23, 21, 22, 1]]
    model = target_of(family).model
    return [Prompt(i, "", None, make_source(ids, model)) for i, ids in enumerate(texts)]


def tree(sampling: SamplingConfig = GREEDY, levels: int | None = None, **shape: object) -> Played:
    """A tree of so many levels, or one that stops by its gain."""
    stop = StopConfig(k=levels) if levels else StopConfig(kind="gain", delta=0.2, max_draft=6)
    return Played(DecodeConfig(drafter="large", tree=Tree(**shape), stop=stop, sampling=sampling))


def cascade(found: Increments, sampling: SamplingConfig = GREEDY) -> Played:
    settings = CascadeConfig(
        drafters=("small", "max-gram"), increments=found.increments, leniency=found.leniency
    )
    return Played(DecodeConfig(drafter="large", cascade=settings, sampling=sampling))


def facts(output: Output) -> list[tuple]:
    """Rounds without their clocks."""
    return [
        (
            list(played.drafted),
            list(played.path),
            list(played.emitted),
            played.passes,
            played.depth,
            {name: calls.count for name, calls in (played.calls or {}).items()},
        )
        for played in output.rounds
    ]


def rate(counts, place: int = 0) -> float:
    """Tokens a round."""
    return float(counts.tokens[:, place].sum() / counts.rounds[:, place].sum())


def nodes_of(candidates: Sequence[Played]) -> list[int]:
    return [one.nodes for one in candidates]


def by_hand(**columns: float) -> dict[str, np.ndarray]:
    return {name: np.array([[float(value)]]) for name, value in columns.items()}
