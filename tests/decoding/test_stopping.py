"""Stop policies compared with hand-computed stops, including the lag of Algorithm 2."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from drafttrain.config.methods import RULES, STOPS
from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.stopping import (
    Confidence,
    Entropy,
    FixedLength,
    HeadPolicy,
    entropy,
    largest_probability,
)
from drafttrain.decoding.types import DraftState, Sampling
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from tests.decoding.decoded import decoder_of, drawn, propose
from tests.decoding.toys import (
    EOS,
    START,
    ScriptedRows,
    ToyModel,
    toy_drafter,
    toy_prompt,
    toy_source,
)

ACCEPTANCE = {1: 1.0, 2: 0.9, 3: 0.5, 4: 1.0}
"""Acceptance probability of each token of the pair below, after any prefix."""
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)


class OneHot:
    """Hidden states that are one-hot vectors of the last token."""

    def __getitem__(self, path: Sequence[int]) -> Tensor:
        return torch.eye(5)[path[-1]]


def knowing_head(acceptance: dict[int, float] = ACCEPTANCE) -> AcceptanceHead:
    """Returns a head that computes the token's true acceptance from its hidden state."""
    head = AcceptanceHead(AcceptanceHeadConfig(hidden_size=5, depth=0))
    for token, probability in acceptance.items():
        logit = torch.tensor(min(probability, 1.0 - 1e-7)).logit()
        head.out.weight.data[0, token] = logit
    return head


def scripted_drafter(tokens: Sequence[int]) -> CausalDrafter:
    model = ToyModel(0)
    model.table, model.hidden = ScriptedRows(tokens, 5), OneHot()
    return CausalDrafter(model)


@pytest.mark.parametrize(
    ("tokens", "h", "wanted"),
    [
        # a token's factor is known two decisions after it was drafted: 1 - .5 > h stops after one
        ([3, 2, 2, 2], 0.45, [3, 2]),
        ([2, 3, 2, 2], 0.45, [2, 3, 2]),
        ([2, 2, 2, 3, 2, 2], 0.45, [2, 2, 2, 3, 2]),
        # .9 -> .1, .81 -> .19, .729 -> .271, .6561 -> .3439, .59049 -> .40951, .531441 -> .468559
        ([2] * 9, 0.45, [2] * 7),
        ([2] * 9, 0.40, [2] * 6),
        # 2 3 2 2: .45 -> .55 after the second, .405 -> .595, .3645 -> .6355, .295 -> .705 by six
        ([2, 3, 2, 2, 2, 2, 2, 2, 2], 0.7, [2, 3, 2, 2, 2, 2, 2]),
        ([4] * 9, 0.05, [4] * 8),  # all accepted: the cap ends the draft, inclusive
        ([2, EOS, 2, 2], 0.9, [2, EOS]),  # EOS ends a draft and belongs to it
    ],
)
def test_stops_match_those_worked_out_by_hand(tokens, h, wanted):
    stop = HeadPolicy(knowing_head(), h, max_draft=8)
    proposal = propose(scripted_drafter(tokens), toy_prompt(), stop=stop)
    assert proposal.tokens.tolist() == wanted
    assert proposal.passes == len(wanted)


def states(*tokens: int) -> tuple[Tensor, ...]:
    return tuple(torch.eye(5)[token] for token in tokens)


def test_a_head_judges_each_state_of_a_round_once():
    policy, notes = HeadPolicy(knowing_head(), 0.45, 8), {}
    assert policy.should_draft(DraftState(1, notes=notes))  # no state is known yet
    for depth, tokens in enumerate([(2,), (2, 2), (2, 2, 3)], 2):
        goes_on = policy.should_draft(DraftState(depth, hidden=states(*tokens), notes=notes))
        assert goes_on == policy.should_draft(DraftState(depth, hidden=states(*tokens)))
        assert goes_on == (3 not in tokens)  # .81 -> .19, .405 -> .595
    assert notes["acceptance"] == pytest.approx([0.9, 0.9, 0.5])
    assert not policy.should_draft(DraftState(8, hidden=states(4)))


def test_a_rejection_exactly_as_likely_as_h_goes_on():
    even = knowing_head({3: 0.5})
    assert HeadPolicy(even, 0.5, 8).should_draft(DraftState(2, hidden=states(3)))
    assert not HeadPolicy(even, 0.4999, 8).should_draft(DraftState(2, hidden=states(3)))


def test_a_head_computes_in_its_own_type_and_without_gradients():
    head = knowing_head().train()
    policy = HeadPolicy(head, 0.5, 8)
    half = DraftState(2, hidden=[torch.eye(5, dtype=torch.float16)[2]])
    assert policy.should_draft(half)
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_entropy_looks_at_the_newest_row_before_temperature():
    sure, even = torch.tensor([9.0, 0.0, 0.0, 0.0]), torch.zeros(4)
    policy = Entropy(math.log(4.0) - 0.01, 5)
    assert policy.should_draft(DraftState(0))
    assert policy.should_draft(DraftState(2, logits=[even, sure]))
    assert not policy.should_draft(DraftState(2, logits=[sure, even]))
    assert Entropy(math.log(4.0) + 0.01, 5).should_draft(DraftState(1, logits=[even]))
    assert not policy.should_draft(DraftState(5, logits=[sure]))


def test_entropy_of_excluded_tokens_counts_nothing():
    row = torch.tensor([0.0, 0.0, -torch.inf])
    assert entropy(row) == pytest.approx(math.log(2.0))
    assert entropy(torch.tensor([1.0, -torch.inf])) == 0.0
    assert largest_probability(row) == pytest.approx(0.5)


def test_confidence_stops_after_a_token_of_low_probability():
    policy = Confidence(0.4, 5)
    high, low = torch.tensor([0.5, 0.25, 0.25]).log(), torch.full((3,), 1.0 / 3).log()
    assert policy.should_draft(DraftState(0))
    assert policy.should_draft(DraftState(1, logits=[high]))
    assert not policy.should_draft(DraftState(1, logits=[low]))
    drafter = scripted_drafter([2] * 6)  # its tokens have probability .83
    for least, length in ((0.8, 5), (0.9, 1)):
        assert len(propose(drafter, toy_prompt(), stop=Confidence(least, 5)).tokens) == length


def test_confidence_is_refused_where_tokens_are_sampled():
    drafter, confidence = CausalDrafter(ToyModel(0)), STOPS["confidence"]
    with pytest.raises(ValueError, match="temperature is 0.7.*its own value.*entropy or head"):
        check_pairing(drafter, confidence, RULES["rejection"], Sampling(0.7))
    check_pairing(drafter, confidence, RULES["greedy"], GREEDY)
    with pytest.raises(ValueError, match="its own value"):
        decoder_of(
            ToyModel(0), scripted_drafter([2]), Confidence(0.4, 5).capped(3), sampling=SAMPLED
        ).decode([toy_prompt()], 3)
    for stop in ("fixed", "entropy", "head"):
        check_pairing(drafter, STOPS[stop], RULES["rejection"], SAMPLED)


def test_names_and_caps_are_those_of_reports():
    head = HeadPolicy(knowing_head(), 0.7, 9)
    stops = [FixedLength(10), Entropy(2.0, 7), Confidence(0.4, 8), head]
    assert [stop.name for stop in stops] == ["k=10", "entropy(2)", "confidence(0.4)", "head(0.7)"]
    assert [stop.longest for stop in stops] == [10, 7, 8, 9]
    assert [stop.capped(8).longest for stop in stops] == [8, 7, 8, 8]


@pytest.mark.parametrize(("committed", "wanted"), [(1, 4), (3, 2), (4, 1), (5, 0), (9, 0)])
def test_drafts_end_where_the_drafters_positions_do(committed, wanted):
    """Four positions; the last draft token needs none."""
    drafter = scripted_drafter([2] * 20)
    drafter.model.source_limit = drafter.model.position_limit = 4
    session = drafter.open(toy_prompt(), GREEDY, drawn())
    tokens = torch.zeros(committed, dtype=torch.long)
    proposal = run_single(session.propose(tokens, None, FixedLength(9)))
    assert len(proposal.tokens) == proposal.passes == wanted
    assert session.sequence.state is None or session.sequence.state.cached <= 4


def endless() -> CausalDrafter:
    model = ToyModel(2, vocabulary=4)
    model.eos_ids = frozenset()
    return CausalDrafter(model)


DRAFTERS = {
    "token by token": endless,
    "slots": toy_drafter,
    "linked slots": lambda: toy_drafter(previous_token_rank=3),
}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_policy_gets_its_notes_back_until_the_round_is_over(kind, sampling):
    """Exactness tests cannot find this: without the cache every state is evaluated repeatedly."""
    known: list[int] = []

    def counts(state: DraftState, value: float) -> bool:
        if state.depth or kind != "token by token":  # no round has begun at its first question
            notes = state.notes.setdefault("questions", [])
            known.append(len(notes))
            notes.append(0.0)
        return True

    stop = StopPolicy(STOPS["entropy"], counts, 1.0, 3)
    session = DRAFTERS[kind]().open(toy_source(), sampling, drawn())
    for committed in ([2], [2, 3, 2]):
        known.clear()
        run_single(session.propose(torch.tensor([START, *committed]), None, stop))
        assert len(known) > 1 and known == list(range(len(known)))
