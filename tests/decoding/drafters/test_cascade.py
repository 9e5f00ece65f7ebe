"""Cascades: exact by enumeration, greedy output, draft lengths, distribution of each token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.batching import BatchedSteps, run_single
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.cascade import (
    InTurnDrafter,
    Level,
    Quota,
    ReviewedDrafter,
    cascade,
    join_chains,
    review,
)
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.requests import ForwardOutput
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.roles import Drafter, Randomness, Verifier
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.decoding.verifiers import BlockVerification, RejectionSampling
from tests.decoding.decoded import decoder_of, drawn
from tests.decoding.enumeration import enumerate_law, enumerate_output, total_variation
from tests.decoding.expected import expected_probs
from tests.decoding.toys import ToyModel, ToyTarget, autoregressive_law, toy_prompt
from tests.tiny_drafters import block_heads, noisy, tiny_drafter
from tests.tiny_models import tiny_model

TABLE = [1, 2, 2]
REJECTION = RejectionSampling()
SAMPLINGS = {
    "temperature 1": Sampling(1.0),
    "top-k": Sampling(1.3, top_k=2),
    "top-p": Sampling(1.5, top_p=0.8),
}


class ToyReviewer(ToyModel):
    """A toy model that can also review: its cache follows any sequence it is given."""

    def score(self, states, tokens, proposals, layers=()):
        scores = []
        for state, committed, proposal in zip(states, tokens, proposals, strict=True):
            drafted = proposal.tokens.tolist()
            state[:] = [*committed.tolist(), *drafted]
            state.committed = len(committed)
            paths = [state[: len(committed) + i] for i in range(len(drafted) + 1)]
            rows = torch.stack([self.table[path] for path in paths])
            scores.append(ForwardOutput(rows, torch.zeros(len(rows), 1)))
        return scores

    def keep(self, state, path):
        del state[state.committed + len(path) :]


def levels(*models: object, table: list[int] | None = TABLE) -> list[Level]:
    """Returns levels of language models, largest first, and Max-Gram."""
    drafters = [*map(CausalDrafter, models), MaxGramDrafter(table)]
    return [Level(f"level {i}", drafter) for i, drafter in enumerate(drafters)]


def small(seed: int = 4, excluded: float = 0.0) -> CausalDrafter:
    return CausalDrafter(ToyModel(seed, excluded=excluded))


def cascades(excluded: float = 0.0) -> dict[str, Drafter]:
    large, middle = ToyReviewer(2, excluded=excluded), ToyReviewer(3, excluded=excluded)
    copied = MaxGramDrafter(TABLE)
    return {
        "vertical": ReviewedDrafter(large, small(excluded=excluded), k=1),
        "vertical, lenient": ReviewedDrafter(large, small(excluded=excluded), 2, leniency=3.0),
        "over max-gram, lenient": ReviewedDrafter(large, copied, 2, leniency=3.0),
        "over a model, then max-gram, lenient": ReviewedDrafter(
            large, InTurnDrafter([Quota(small(3, excluded), 1), Quota(copied, 1)]), 2, leniency=3.0
        ),
        "horizontal": InTurnDrafter([Quota(small(2, excluded), 1), Quota(small(3, excluded), 1)]),
        "horizontal to max-gram": InTurnDrafter([Quota(small(2, excluded), 1), Quota(copied, 1)]),
        "of depth two": cascade(levels(large), [[2, 0], [10]], leniency=1.5),
        "of depth two, then max-gram": cascade(levels(large), [[1, 1], [1]], leniency=1.5),
        "of depth three": cascade(levels(large, middle), [[1, 1, 0], [1, 0], [10]], 2.0),
    }


def law_of(
    drafter: Drafter,
    sampling: Sampling,
    excluded: float = 0.0,
    verifier: Verifier = REJECTION,
) -> dict:
    decoder = decoder_of(ToyTarget(1, 3, excluded), drafter, 2, verifier, sampling)
    return enumerate_output(decoder, [toy_prompt()], 3)


WAYS = [(name, REJECTION) for name in SAMPLINGS] + [("temperature 1", BlockVerification())]


@pytest.mark.parametrize(("setting", "verifier"), WAYS)
@pytest.mark.parametrize("excluded", [0.0, 0.4], ids=["full", "supports apart"])
@pytest.mark.parametrize("name", cascades())
def test_sampled_cascades_follow_the_target_exactly(name, excluded, setting, verifier):
    """Inner levels review token by token, so each token's distribution is known when drawn."""
    sampling = SAMPLINGS[setting]
    law = law_of(cascades(excluded)[name], sampling, excluded, verifier)
    expected = autoregressive_law(ToyTarget(1, 3, excluded), sampling, 3)
    assert total_variation(law, expected) < 1e-12


@pytest.mark.parametrize("leniency", [1.0, 1.5, 3.0])
def test_a_token_handed_out_follows_the_row_that_comes_with_it(leniency):
    """The first draft token, over all random choices inside, is distributed as its row."""
    drafter = ReviewedDrafter(ToyReviewer(2), small(), 2, leniency)
    seen: dict[tuple, Tensor] = {}

    def run(randomness: Randomness) -> int:
        session = drafter.open(toy_prompt(), Sampling(1.0), randomness)
        proposal = run_single(session.propose(torch.tensor([0]), None, FixedLength(1)))
        seen["row"] = proposal.draft_probs[0]
        return int(proposal.tokens[0])

    law = enumerate_law(run)
    assert [law.get(t, 0.0) for t in range(3)] == pytest.approx(seen["row"].tolist(), abs=1e-12)


class HidesItsRow(ReviewedDrafter):
    """Wrong on purpose: claims that lenient tokens are distributed as the reviewer's row."""

    def open(self, source: Source, sampling: Sampling, randomness: Randomness):
        session = super().open(source, sampling, randomness)
        propose = session.propose

        def pretend(tokens: Tensor, target_state, stop) -> BatchedSteps[Proposal]:
            found = yield from propose(tokens, target_state, stop)
            path, rows = tokens.tolist(), []
            for token in found.tokens.tolist():
                rows.append(expected_probs(self.reviewer.table[path], sampling))
                path.append(token)
            return Proposal.chain(found.tokens, torch.stack(rows)) if rows else found

        session.propose = pretend
        return session


def test_control_a_lenient_token_with_the_reviewers_row_is_detected():
    drafter = HidesItsRow(ToyReviewer(2), small(), 2, leniency=3.0)
    expected = autoregressive_law(ToyTarget(1), Sampling(1.0), 3)
    assert total_variation(law_of(drafter, Sampling(1.0)), expected) > 0.01


@pytest.mark.parametrize("wanted", range(1, 12))
def test_a_cascade_drafts_exactly_as_many_tokens_as_requested(wanted):
    """The original code drafted 19 tokens if 10 were requested."""
    models = [ToyReviewer(2), ToyReviewer(3)]
    for model in models:
        model.eos_ids = frozenset()
    drafter = cascade(levels(*models), [[5, 3, 2], [2, 1], [10]], 1.5)
    for sampling in (Sampling(), Sampling(1.0)):
        session = drafter.open(toy_prompt(), sampling, drawn())
        proposal = run_single(session.propose(torch.tensor([0]), None, FixedLength(wanted)))
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
    models = ToyReviewer(2), ToyReviewer(3)
    first, second = cascade(levels(*models), [[1, 4, 0], [5, 2], [7]]).quotas
    assert (first.drafter.k, second.drafter.k) == (7, 2)
    inner_model, inner_copies = first.drafter.inner.quotas
    assert (inner_model.count, inner_copies.count) == (5, 2)
    assert inner_model.drafter.k == 7
    assert [quota.count for quota in second.drafter.inner.quotas] == [2]
    [_, alone] = cascade(levels(*models), [[1, 4, 0], [5, 0], [7]]).quotas
    assert isinstance(alone.drafter, CausalDrafter)


@pytest.mark.parametrize("leniency", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("family", ["llama", "gpt2", "marian", "t5"])
def test_greedy_cascades_of_real_models_give_plain_output(family, leniency):
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    others = [noisy(model, family, scale) for scale in (0.05, 0.15)]
    for other in others:
        other.generation_config.eos_token_id = None
    target, source = CachedModel(model), make_source([5, 9, 20, 5], model)
    first, second = (CachedModel(other) for other in others)

    def decode(drafter: Drafter, temperature: float = 0.0) -> Output:
        return decoder_of(target, drafter, 6, None, Sampling(temperature)).decode_all([source], 30)[
            0
        ]

    plain = decode(NoDrafter())
    for drafter in (
        cascade(levels(first, table=None), [[5, 1], [10]], leniency),
        cascade(levels(first, second, table=None), [[3, 2, 1], [2, 0], [10]], leniency),
        InTurnDrafter([Quota(CausalDrafter(first), 2), Quota(CausalDrafter(second), 3)]),
    ):
        found = decode(drafter)
        assert found.tokens == plain.tokens
        assert len(found.rounds) < len(plain.rounds)
        assert len(decode(drafter, 0.8).tokens) == 30


LEVELS_OF_ALL_KINDS = {
    "a block drafter reviewed": [[3, 2, 0], [3, 1], [0]],
    "a block drafter in turn": [[1, 4, 2], [0, 0], [0]],
    "block heads and copies in turn": [[0, 3, 2], [0, 0], [0]],
}


@pytest.mark.parametrize("matrix", LEVELS_OF_ALL_KINDS.values(), ids=LEVELS_OF_ALL_KINDS.keys())
@pytest.mark.parametrize("kind", ["spec-drafter", "block-heads"])
def test_drafters_that_draft_blocks_are_levels_too(kind, matrix):
    model = tiny_model("marian")
    model.generation_config.eos_token_id = None
    other = noisy(model, "marian", 0.05)
    other.generation_config.eos_token_id = None
    if kind == "spec-drafter":
        block: Drafter = BlockDrafter(tiny_drafter("marian", previous_token_rank=2))
    else:
        block = BlockHeadsDrafter(block_heads(k=5), model)
    copies = MaxGramDrafter()
    drafters = [CausalDrafter(CachedModel(other)), block, copies]
    names = ["causal", kind, "max-gram"]
    drafter = cascade([*map(Level, names, drafters)], matrix)
    target, source = CachedModel(model), make_source([5, 9, 20, 5], model)

    def decode(drafter: Drafter, temperature: float = 0.0) -> Output:
        decoder = decoder_of(target, drafter, sum(matrix[0]), None, Sampling(temperature))
        return decoder.decode_all([source], 24)[0]

    drafted = decode(drafter)
    assert drafted.tokens == decode(NoDrafter()).tokens
    assert any(kind in (round.calls or {}) for round in drafted.rounds)
    assert len(decode(drafter, 0.8).tokens) == 24


WRONG = {
    "leniency = 0.5": lambda: ReviewedDrafter(ToyReviewer(2), small(), 2, leniency=0.5),
    "k = 0 tokens": lambda: ReviewedDrafter(ToyReviewer(2), small(), k=0),
    r"quotas \[0, 0\]": lambda: InTurnDrafter([Quota(small(), 0), Quota(small(), 0)]),
    r"quotas \[-1, 2\]": lambda: InTurnDrafter([Quota(small(), -1), Quota(small(), 2)]),
    "must have 3 rows, of 3, 2, 1 numbers": lambda: cascade(
        levels(ToyReviewer(2), ToyReviewer(3)), [[1, 2], [1]]
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_impossible_cascades_are_refused(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()
