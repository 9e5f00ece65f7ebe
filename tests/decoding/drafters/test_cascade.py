"""Cascades: reviews, draft lengths, and the distribution of each token."""

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.cascade import (
    Level,
    ReviewedDrafter,
    cascade,
    join_chains,
    review,
)
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Proposal, Sampling
from tests.decoding.decoded import propose
from tests.decoding.enumeration import enumerate_law
from tests.decoding.toys import ToyModel, toy_prompt


def levels(*models: ToyModel) -> list[Level]:
    """Returns levels of language models, largest first, and Max-Gram."""
    drafters = [*map(CausalDrafter, models), MaxGramDrafter([1, 2, 2])]
    return [Level(f"level {i}", drafter) for i, drafter in enumerate(drafters)]


@pytest.mark.parametrize("leniency", [1.0, 1.5, 3.0])
def test_a_token_handed_out_follows_the_row_that_comes_with_it(leniency):
    """The first draft token, over all random choices inside, is distributed as its row."""
    drafter = ReviewedDrafter(ToyModel(2), CausalDrafter(ToyModel(4)), 2, leniency)
    seen: dict[tuple, Tensor] = {}

    def run(randomness: Randomness) -> int:
        session = drafter.open(toy_prompt(), Sampling(1.0), randomness)
        proposal = run_single(session.propose(torch.tensor([0]), None, FixedLength(1)))
        seen["row"] = proposal.draft_probs[0]
        return int(proposal.tokens[0])

    law = enumerate_law(run)
    assert [law.get(t, 0.0) for t in range(3)] == pytest.approx(seen["row"].tolist(), abs=1e-12)


@pytest.mark.parametrize("wanted", range(1, 12))
def test_a_cascade_drafts_exactly_as_many_tokens_as_requested(wanted):
    """The original code drafted 19 tokens if 10 were requested."""
    models = [ToyModel(2), ToyModel(3)]
    for model in models:
        model.eos_ids = frozenset()
    drafter = cascade(levels(*models), [[5, 3, 2], [2, 1], [10]], 1.5)
    for sampling in (Sampling(), Sampling(1.0)):
        proposal = propose(drafter, toy_prompt(), None, wanted, sampling)
        assert len(proposal.tokens) == min(wanted, 10)


def test_lenient_greedy_review_by_hand():
    """Reviewer (.5, .3, .2) unwarped, inner token 1 with .4: .3 > .4 / 1.5, but not > .4 / 1.2."""
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    inner = Proposal.chain(torch.tensor([1]), logits=lambda: [torch.tensor([0.3, 0.4, 0.3]).log()])
    assert review(inner, logits, Sampling(), None, 1.5)[0] == [1, 2]
    assert review(inner, logits, Sampling(), None, 1.2)[0] == [0]
    assert review(inner, logits, Sampling(), None, 1.0)[0] == [0]
    copied = Proposal.chain(torch.tensor([1]))
    assert review(copied, logits, Sampling(), None, 3.0)[0] == [0]  # strict against max-gram


def mixed(sampled: bool, copies: list[int]) -> Proposal:
    """Returns a draft of one token from a model's row, followed by copies of Max-Gram."""
    row = torch.tensor([[0.3, 0.4, 0.3]], dtype=torch.float64)
    drawn = Proposal.chain(
        torch.tensor([1]), row if sampled else None, logits=lambda: [row[0].log()]
    )
    return join_chains([drawn, Proposal.chain(torch.tensor(copies, dtype=torch.long))])


@pytest.mark.parametrize("copies", [[], [2]])
def test_a_models_tokens_are_reviewed_leniently_though_copies_follow(copies):
    """0.3 > 0.4 / 1.5 accepts token 1, though 0 is likelier; the copy, no arg-max, is rejected."""
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [1.0, 0.0, 0.0]]).double().log()
    emitted, _ = review(mixed(False, copies), logits[: 2 + len(copies)], Sampling(), None, 1.5)
    assert emitted == [1, 0]


def test_copies_after_a_models_tokens_are_reviewed_strictly():
    """Token 1 is accepted with min(1, 3 x 0.3 / 0.4) = 1, the copy of 2 with its 0.3."""
    rows = [[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [1.0, 0.0, 0.0]]
    logits = torch.tensor(rows, dtype=torch.float64).log()

    def run(randomness: Randomness) -> tuple[int, ...]:
        return tuple(review(mixed(True, [2]), logits, Sampling(1.0), randomness, 3.0)[0])

    law = enumerate_law(run)
    passed = sum(probability for tokens, probability in law.items() if tokens[:2] == (1, 2))
    assert passed == pytest.approx(0.3, abs=1e-12)


def test_each_level_follows_its_columns_of_the_k_matrix():
    """K for A, B and copies: A reviews 5 tokens of B, which reviews 7 copies; then B reviews 2."""
    models = ToyModel(2), ToyModel(3)
    first, second = cascade(levels(*models), [[1, 4, 0], [5, 2], [7]]).levels
    assert (first.drafter.k, second.drafter.k) == (7, 2)
    inner_model, inner_copies = first.drafter.inner.levels
    assert (inner_model.count, inner_copies.count) == (5, 2)
    assert inner_model.drafter.k == 7
    assert [level.count for level in second.drafter.inner.levels] == [2]
    [_, alone] = cascade(levels(*models), [[1, 4, 0], [5, 0], [7]]).levels
    assert isinstance(alone.drafter, CausalDrafter)


def test_an_impossible_cascade_is_refused():
    with pytest.raises(ValueError, match="must have 3 rows, of 3, 2, 1 numbers"):
        cascade(levels(ToyModel(2), ToyModel(3)), [[1, 2], [1]])
