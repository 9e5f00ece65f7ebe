"""Tree drafters: exact by enumeration with every rule that takes them, their trees, their cache."""

from __future__ import annotations

import pytest

from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.trees import TreeDrafter
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.stopping import FixedLength, Gain
from drafttrain.decoding.tree_shapes import Branching, Optimal, Paths, binary_tree
from drafttrain.decoding.tree_verifiers import (
    KSeq,
    MultiRound,
    RecursiveRejection,
    TargetWalk,
)
from drafttrain.decoding.types import Chance, Drafter, Sampling, StopPolicy, Verifier
from tests.decoding.enumeration import enumerate_law
from tests.decoding.toys import (
    ToyModel,
    ToyTarget,
    autoregressive_law,
    toy_prompt,
)

SAMPLINGS = {
    "temperature 1": Sampling(1.0),
    "top-k": Sampling(1.3, top_k=2),
    "top-p": Sampling(1.5, top_p=0.8),
}


def toy(shape, seed: int = 2, excluded: float = 0.0) -> TreeDrafter:
    return TreeDrafter(CausalDrafter(ToyModel(seed, excluded=excluded)), shape)


def law_of(
    drafter: Drafter,
    verifier: Verifier,
    sampling: Sampling,
    stop: StopPolicy,
    excluded: float = 0.0,
    max_new_tokens: int = 3,
) -> dict[tuple[int, ...], float]:
    def run(chance: Chance) -> tuple[int, ...]:
        [output] = Decoder(
            ToyTarget(1, excluded=excluded), drafter, stop, verifier, sampling, chance
        ).decode_all([toy_prompt()], max_new_tokens)
        return tuple(output.tokens)

    return enumerate_law(run)


def distance(law: dict, other: dict) -> float:
    assert abs(sum(law.values()) - 1.0) < 1e-12
    return max(abs(law.get(x, 0.0) - other.get(x, 0.0)) for x in law.keys() | other.keys())


PAIRS = {
    "paths k-seq": (Paths(2), KSeq, FixedLength(2)),
    "paths multi-round": (Paths(2), MultiRound, FixedLength(2)),
    "paths walk": (Paths(2), TargetWalk, FixedLength(2)),
    "rsd-c": (Branching((2, 1)), RecursiveRejection, FixedLength(2)),
    "rsd-c walk": (Branching((2, 2)), TargetWalk, FixedLength(2)),
    "opt-tree": (Optimal(4), TargetWalk, Gain(0.1, 2)),
    "binary": (binary_tree(6), TargetWalk, FixedLength(2)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("excluded", [0.0, 0.4], ids=["full", "supports apart"])
@pytest.mark.parametrize("name", PAIRS)
def test_decoding_with_trees_follows_the_target_exactly(name, excluded, sampling):
    shape, verifier, stop = PAIRS[name]
    law = law_of(toy(shape, excluded=excluded), verifier, sampling, stop, excluded)
    expected = autoregressive_law(ToyTarget(1, excluded=excluded), sampling, 3)
    assert distance(law, expected) < 1e-12
