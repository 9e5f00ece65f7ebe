"""The decoding of a sequence does not depend on the other sequences of its batch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import Entropy, FixedLength
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Beam, Branching
from drafttrain.decoding.types import Sampling
from tests.decoding.decoded import decoder_of, generate, sources_for, tokens_of
from tests.tiny_drafters import block_heads, shared, tiny_drafter
from tests.tiny_models import CAUSAL_FAMILIES, FAMILIES, SPEECH_FAMILIES, near_copy, tiny_model

Make = Callable[[PreTrainedModel], Drafter]
NEW = 20
SAMPLED = Sampling(temperature=0.6, top_k=20)


def causal(model: PreTrainedModel, seed: int = 1) -> CausalDrafter:
    return CausalDrafter(CachedModel(near_copy(model, 0.05, seed=seed)))


def levels(model: PreTrainedModel) -> Drafter:
    several = [Level("one", causal(model)), Level("two", causal(model, 2))]
    return cascade([*several, Level("max-gram", MaxGramDrafter())], [[2, 1, 2], [3, 1], [3]])


def over_slots(shape, **settings) -> Make:
    return lambda model: TreeDrafter(BlockDrafter(tiny_drafter("marian", **settings)), shape)


ANY: dict[str, Make] = {
    "plain": lambda model: NoDrafter(),
    "causal": causal,
    "max-gram": lambda model: MaxGramDrafter(),
    "cascade": levels,
    "heads": lambda model: BlockHeadsDrafter(block_heads(), model),
}
TREES: dict[str, Make] = {
    "opt-tree": lambda model: TreeDrafter(causal(model), Optimal(9)),
    "rsd-s": lambda model: TreeDrafter(causal(model), Beam(3)),
    "rsd-c": lambda model: TreeDrafter(causal(model), Branching((2, 2))),
    "several": lambda model: SeveralDrafters([causal(model), causal(model, 2)]),
}


SLOTS: dict[str, Make] = {
    name: partial(lambda model, settings: BlockDrafter(tiny_drafter(**settings)), settings=settings)
    for name, settings in {
        "anchored": {"previous_token_rank": 3},
        "paper": {"slots": "paper"},
        "target's encoder": {"encoder": "target", "previous_token_rank": 3},
        "bidirectional": {"slots": "paper", "prefix_attention": "bidirectional"},
    }.items()
}
SLOTS |= {
    "opt-tree over slots": over_slots(Optimal(9), previous_token_rank=3),
    "rsd-s over slots": over_slots(Beam(3)),
}


def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    stop: StopPolicy,
    sampling: Sampling,
    batch_size: int,
) -> list[list[int]]:
    seeded = partial(sequence_randomness, 4)
    decoder = decoder_of(model, drafter, stop, None, sampling, seeded)
    return tokens_of(decoder.decode_all(sources_for(model, 8), NEW, batch_size))


def check(model: PreTrainedModel, make: Make, stop: StopPolicy, sampling: Sampling) -> None:
    drafter = make(model)
    each = decode(model, drafter, stop, sampling, 1)
    if sampling.greedy:
        assert each == generate(model, sources_for(model, 8), NEW)
    for batch_size in (3, 8) if sampling.greedy else (3,):
        assert decode(model, drafter, stop, sampling, batch_size) == each


@pytest.mark.parametrize("name", [*ANY, *TREES])
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_chains_and_trees_of_a_batch_equal_those_of_single_sequences(family, name):
    if name != "several":  # independent drafts need sampling
        check(tiny_model(family), (ANY | TREES)[name], FixedLength(4), Sampling())
    check(tiny_model(family), (ANY | TREES)[name], FixedLength(4), SAMPLED)


@pytest.mark.parametrize("family", [*FAMILIES, *SPEECH_FAMILIES, *CAUSAL_FAMILIES])
def test_every_family_decodes_in_batches(family):
    check(tiny_model(family), ANY["causal"], FixedLength(3), Sampling())
    check(tiny_model(family), TREES["opt-tree"], FixedLength(3), Sampling())


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SLOTS)
def test_blocks_of_a_batch_equal_those_of_single_sequences(name, sampling):
    check(shared("marian"), SLOTS[name], FixedLength(4), sampling)


@pytest.mark.parametrize("rank", [0, 3], ids=["slots alone", "previous tokens"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drafters_in_half_precision_draft_for_any_target(dtype, rank):
    model = shared("marian")
    drafter = BlockDrafter(tiny_drafter(previous_token_rank=rank).to(dtype))
    expected = generate(model, sources_for(model, 8), NEW)
    for draft in (drafter, TreeDrafter(drafter, Optimal(9))):
        assert decode(model, draft, FixedLength(4), Sampling(), 3) == expected
    assert all(decode(model, drafter, FixedLength(4), SAMPLED, 3))


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["causal", "anchored"])
def test_drafts_of_several_lengths_share_their_calls(name, sampling):
    """Each sequence's policy ends its own draft while others continue."""
    check(shared("marian"), (ANY | SLOTS)[name], Entropy(2.0, 6), sampling)
