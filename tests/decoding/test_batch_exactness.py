"""A row of a batch follows the target's distribution exactly, whatever the other rows are.

Real models with four tokens and shared caches: enumerates every random outcome of one row, while
rows of other lengths draw from their own random streams.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.decoding.stopping import Entropy, FixedLength
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Branching, Paths
from drafttrain.decoding.trees.verifiers import (
    KSeq,
    MultiRound,
    RecursiveRejection,
    TargetWalk,
)
from drafttrain.decoding.types import Sampling, Source
from drafttrain.decoding.verifiers import BlockVerification, RejectionSampling
from tests.decoding.decoded import decoder_of
from tests.decoding.drafters.toy_blocks import toy_drafter
from tests.decoding.enumeration import enumerate_output, total_variation
from tests.decoding.expected import expected_probs
from tests.decoding.toys import EOS
from tests.tiny_drafters import block_heads
from tests.tiny_models import near_copy, tiny_model

SAMPLING = Sampling(1.5, top_k=2)
LONGEST = 3
SMALL = {"llama": {"vocab_size": 4}, "marian": {"vocab_size": 4, "decoder_vocab_size": 4}}
PROMPTS = ([3], [2, 3, 3], [2, 2, 3, 2, 3], [3, 2])


def small(family: str) -> PreTrainedModel:
    model = tiny_model(family, **SMALL[family])
    model.lm_head.weight.data *= 0.3  # flatter, so that all rows matter
    return model


def causal(model: PreTrainedModel, seed: int = 1) -> CausalDrafter:
    return CausalDrafter(CachedModel(near_copy(model, 0.3, seed=seed)))


def levels(model: PreTrainedModel) -> Drafter:
    several = [Level("one", causal(model)), Level("two", causal(model, 2))]
    return cascade([*several, Level("max-gram", MaxGramDrafter())], [[1, 1, 0], [1, 0], [1]], 1.5)


def slots(model: PreTrainedModel) -> BlockDrafter:
    return toy_drafter(slots="anchored", previous_token_rank=3)


ANY: dict[str, tuple[Callable[[PreTrainedModel], Drafter], StopPolicy, object]] = {
    "plain": (lambda model: NoDrafter(), FixedLength(1), RejectionSampling()),
    "chain": (causal, FixedLength(2), RejectionSampling()),
    "chain that stops": (causal, Entropy(0.6, 2), RejectionSampling()),
    "chain that stops, by blocks": (causal, Entropy(0.6, 2), BlockVerification()),
    "heads": (
        lambda model: BlockHeadsDrafter(block_heads(vocab_size=4), model),
        FixedLength(2),
        RejectionSampling(),
    ),
    "max-gram": (lambda model: MaxGramDrafter(), FixedLength(2), RejectionSampling()),
    "max-gram, by blocks": (lambda model: MaxGramDrafter(), FixedLength(2), BlockVerification()),
    "cascade": (levels, FixedLength(2), RejectionSampling()),
    "cascade, by blocks": (levels, FixedLength(2), BlockVerification()),
    "opt-tree": (lambda model: TreeDrafter(causal(model), Optimal(4)), FixedLength(2), TargetWalk),
    "rsd-c": (
        lambda model: TreeDrafter(causal(model), Branching((2, 1))),
        FixedLength(2),
        RecursiveRejection,
    ),
    "paths": (lambda model: TreeDrafter(causal(model), Paths(2)), FixedLength(2), MultiRound),
    "paths k-seq": (lambda model: TreeDrafter(causal(model), Paths(2)), FixedLength(1), KSeq),
}
SLOTS = {
    "block": (slots, FixedLength(2), RejectionSampling()),
    "block, by blocks": (slots, FixedLength(2), BlockVerification()),
    "tree over slots": (
        lambda model: TreeDrafter(slots(model), Branching((2, 1))),
        FixedLength(2),
        RecursiveRejection,
    ),
}
CASES = [("llama", 1, 4, name) for name in ANY] + [("marian", 3, 2, name) for name in ANY | SLOTS]
"""Batch rows between others, and batch rows that are reused after another sequence ended."""


@pytest.mark.parametrize(("family", "place", "batch_size", "name"), CASES)
def test_a_row_in_a_batch_follows_the_target_exactly(family, place, batch_size, name):
    model = small(family)
    make, stop, verifier = (ANY | SLOTS)[name]
    decoder = decoder_of(model, make(model), stop, verifier, SAMPLING)
    sources = [make_source(prompt, model) for prompt in PROMPTS]
    law = enumerate_output(decoder, sources, LONGEST, place, batch_size)
    expected = law_of_model(model, sources[place])
    assert len(expected) > 3
    assert total_variation(law, expected) < 1e-12


def law_of_model(
    model: PreTrainedModel,
    source: Source,
    sampling: Sampling = SAMPLING,
    longest: int = LONGEST,
    processor: LogitsProcessor | None = None,
) -> dict[tuple[int, ...], float]:
    """Enumerates plain sampling with the model's forward, without cache and batch."""
    law: dict[tuple[int, ...], float] = {}

    def extend(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == longest or tokens[-1:] == (EOS,):
            law[tokens] = probability
            return
        path = torch.cat([source.prefix, torch.tensor(tokens, dtype=torch.long)])[None]
        given = {"input_ids": path}
        if model.config.is_encoder_decoder:
            given = {"input_ids": source.input_ids[None], "decoder_input_ids": path}
        with torch.no_grad():
            row = model(**given).logits[:, -1]
        row = row[0] if processor is None else processor(path, row)[0]
        for token, p in enumerate(expected_probs(row, sampling).tolist()):
            if p > 0.0:
                extend((*tokens, token), probability * p)

    extend((), 1.0)
    return law
