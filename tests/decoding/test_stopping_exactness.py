"""Stop policies never change the output distribution: enumerates production code."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.batching import BatchedSteps
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.causal import CausalDrafter, CausalSession
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy, Verifier
from drafttrain.decoding.stopping import Cumulative, Entropy, FixedLength, HeadPolicy
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Proposal, Sampling, Source
from drafttrain.decoding.verifiers import BlockVerification, RejectionSampling
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from drafttrain.models.draft_states import ROW_FEATURES, StateKind
from tests.decoding.decoded import decoder_of
from tests.decoding.enumeration import enumerate_law, total_variation
from tests.decoding.toys import EOS, ToyModel, ToyTarget, autoregressive_law, toy_prompt, toy_source
from tests.tiny_drafters import drafter_of
from tests.tiny_models import tiny_model

Law = dict[tuple[int, ...], float]

WIDE = Sampling(temperature=1.0)
ALL = Sampling(temperature=1.3, top_k=3, top_p=0.9)


def random_head(width: int, seed: int, depth: int, state: StateKind = "token") -> AcceptanceHead:
    """Returns a head with weights large enough that predictions vary between states."""
    torch.manual_seed(seed)
    width += ROW_FEATURES if state == "drawn" else 0
    head = AcceptanceHead(AcceptanceHeadConfig(hidden_size=width, depth=depth, state=state))
    for parameter in head.parameters():
        parameter.data.normal_()
    return head


CHAIN_STOPS: dict[str, StopPolicy] = {
    "fixed": FixedLength(3),
    "entropy": Entropy(0.6, 3),
    "head": HeadPolicy(random_head(4, seed=0, depth=2), 0.5, 3),
    "drawn": HeadPolicy(random_head(4, seed=1, depth=1, state="drawn"), 0.5, 3),
    "cumulative": Cumulative(0.7, 3),
}
RULES = {rule.name: rule for rule in (RejectionSampling(), BlockVerification())}
BLOCK_STOPS: dict[str, StopPolicy] = {
    "entropy": Entropy(0.9, 3),
    "cumulative": Cumulative(0.3, 3),
}


@dataclass
class Played:
    """The output distribution, and whether some drafts, but not all, ended early."""

    law: Law
    early: set[bool]


def play(
    target: ToyTarget | CachedModel,
    drafter: Drafter,
    stop: StopPolicy,
    sampling: Sampling,
    max_new_tokens: int,
    source: Source,
    verifier: Verifier = RULES["rejection"],
) -> Played:
    early: set[bool] = set()

    def run(randomness: Randomness) -> tuple[int, ...]:
        [output] = decoder_of(
            target, drafter, stop, verifier, sampling, lambda _: randomness
        ).decode_all([source], max_new_tokens)
        left = max_new_tokens
        for played in output.rounds:
            if left > 1 and EOS not in played.drafted:
                early.add(len(played.drafted) < min(stop.longest, left - 1))
            left -= len(played.emitted)
        return tuple(output.tokens)

    law = enumerate_law(run)
    return Played(law, early)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", [WIDE, ALL], ids=["temperature 1", "all"])
@pytest.mark.parametrize("kind", CHAIN_STOPS)
def test_a_causal_drafter_is_exact_under_every_policy(kind, sampling, rule):
    target, drafter = ToyTarget(1), CausalDrafter(ToyModel(2))
    played = play(target, drafter, CHAIN_STOPS[kind], sampling, 4, toy_prompt(), RULES[rule])
    assert total_variation(played.law, autoregressive_law(target, sampling, 4)) < 1e-12
    if sampling == WIDE:
        assert played.early == ({False} if kind == "fixed" else {True, False})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("kind", "seed"), [("entropy", 0), ("head", 1), ("drawn", 2), ("cumulative", 0)]
)
def test_supports_that_do_not_contain_each_other_stay_exact(kind, seed, rule):
    target = ToyTarget(10 + seed, vocabulary=4, excluded=0.4)
    drafter = CausalDrafter(ToyModel(20 + seed, vocabulary=4, excluded=0.4))
    played = play(target, drafter, CHAIN_STOPS[kind], WIDE, 4, toy_prompt(), RULES[rule])
    assert total_variation(played.law, autoregressive_law(target, WIDE, 4)) < 1e-12
    assert played.early == {True, False}


@pytest.mark.parametrize(("kind", "sampling"), [("entropy", WIDE), ("cumulative", ALL)])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("rule", RULES)
def test_a_block_that_ends_before_verification_is_exact(rule, rank, kind, sampling):
    target, drafter = ToyTarget(3, vocabulary=4), block_drafter(rank)
    played = play(target, drafter, BLOCK_STOPS[kind], sampling, 3, toy_source(), RULES[rule])
    assert total_variation(played.law, autoregressive_law(target, sampling, 3)) < 1e-12
    if sampling == WIDE:
        assert played.early == {True, False}


def block_drafter(rank: int) -> BlockDrafter:
    small = {"vocab_size": 4, "decoder_vocab_size": 4, "tie_word_embeddings": True}
    model = drafter_of(tiny_model("marian", **small), k=3, previous_token_rank=rank)
    if rank:
        model.previous_token.out.weight.data.normal_(std=0.3)
    return BlockDrafter(model)


class LooksAtOwnValue(CausalDrafter):
    """Ends a draft at its first token with probability below 0.4, after drawing it.

    Keeping that token is exact; dropping it is wrong on purpose.
    """

    def __init__(self, model: ToyModel, keep: bool) -> None:
        super().__init__(model)
        self.keep = keep

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> CuttingSession:
        return CuttingSession(super().open(source, sampling, randomness), self.keep)


@dataclass
class CuttingSession:
    inner: CausalSession
    keep: bool

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        draft = yield from self.inner.propose(tokens, target_state, stop)
        if draft.draft_probs is None:
            return draft
        own = draft.draft_probs.gather(1, draft.tokens[:, None])[:, 0]
        unsure = (own < 0.4).nonzero()
        if len(unsure) == 0:
            return draft
        length = int(unsure[0]) + self.keep
        shorter = Proposal.chain(draft.tokens[:length], draft.draft_probs[:length])
        return shorter if length else Proposal.empty()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keep", [True, False])
def test_a_stop_may_depend_on_the_last_token_but_not_on_the_next(keep, rule):
    target, drafter = ToyTarget(1), LooksAtOwnValue(ToyModel(2), keep)
    played = play(target, drafter, FixedLength(2), WIDE, 3, toy_prompt(), RULES[rule])
    bias = total_variation(played.law, autoregressive_law(target, WIDE, 3))
    assert bias < 1e-12 if keep else bias > 0.01
