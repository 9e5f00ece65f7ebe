"""How often the target's token is the drafter's first, second, ... choice.

What a fixed tree is built from (Sequoia, Chen et al. 2024, and OPT-Tree, Figure 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from datasets import Dataset

from drafttrain.build.method import build_sampling
from drafttrain.build.pairs import Pair
from drafttrain.config.decode import DecodeConfig, SamplingConfig
from drafttrain.decoding.drafters.tree import GrowingDrafter, TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.trees.fixed import Fixed
from drafttrain.decoding.trees.verifiers import TargetWalk
from drafttrain.decoding.types import Sampling, Source
from drafttrain.evaluation.prompts import read_prompts

RANKS = 16


def measure_acceptance_by_rank(
    target: CachedModel,
    drafter: GrowingDrafter,
    sampling: Sampling,
    randomness: Callable[[int], Randomness],
    sources: Sequence[Source],
    max_new_tokens: int,
    ranks: int = RANKS,
) -> tuple[float, ...]:
    """Share of the drafter's rows in which the target's token has rank 0, 1, ...

    The sources are decoded with the drafter's `ranks` best next tokens as a tree of one level: a
    round accepts the one that is the target's. Raises ValueError where nothing was drafted.
    """
    ranks = min(ranks, drafter.vocabulary)
    level = Fixed(frozenset((rank,) for rank in range(ranks)), "ranks")
    outputs = Decoder(
        target, TreeDrafter(drafter, level), FixedLength(1), TargetWalk, sampling, randomness
    ).decode_all(sources, max_new_tokens)
    rounds = [played for output in outputs for played in output.rounds if played.drafted]
    if not rounds:
        raise ValueError("no round drafted anything; give longer outputs (max_new_tokens)")
    counts = [0] * ranks
    for played in rounds:
        for node in played.path:
            counts[node] += 1
    return tuple(count / len(rounds) for count in counts)


def needs_ranks(method: DecodeConfig) -> bool:
    """Whether a tree is built from acceptance by rank, and nobody has given it."""
    return method.tree.kind == "sequoia" and method.tree.by_rank is None


def with_ranks(
    methods: Sequence[DecodeConfig], by_rank: tuple[float, ...] | None
) -> list[DecodeConfig]:
    """The methods with this acceptance by rank where a tree needs it and has none."""
    return [
        method.model_copy(update={"tree": method.tree.model_copy(update={"by_rank": by_rank})})
        if by_rank is not None and needs_ranks(method)
        else method
        for method in methods
    ]


def measure_ranks(
    pair: Pair, sampling: SamplingConfig, rows: Dataset, data_name: str
) -> tuple[float, ...]:
    """Acceptance by rank of a pair's drafter on the rows of `load_inputs`, printed too."""
    model = CachedModel(pair.target.model)
    prompts, _ = read_prompts(pair.target, model, rows)
    by_rank = measure_acceptance_by_rank(
        model,
        pair.drafter,
        build_sampling(sampling),
        partial(sequence_randomness, sampling.seed, device=model.device),
        [prompt.source for prompt in prompts],
        sampling.max_new_tokens,
    )
    shares = ", ".join(f"{share:.3f}" for share in by_rank)
    print(f"acceptance by rank on {len(prompts)} prompts of {data_name}: {shares}")
    return by_rank
