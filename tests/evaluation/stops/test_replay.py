"""Replayed counts on traces written by hand."""

import numpy as np
import pytest
import torch

from drafttrain.evaluation.stops.replay import Candidate, draft_lengths, replay
from drafttrain.evaluation.stops.trace import (
    AcceptedPath,
    Trace,
    WrongBranch,
    first_rejection,
    join,
    run_lengths,
)

FIXED = [Candidate("fixed", k) for k in (1, 2, 3, 4)]


def branch(
    position: int, tokens: int, ended: bool = False, first_state: float = 100.0
) -> WrongBranch:
    """States are numbered from first_state on; entropies are their negatives, rows uncertain."""
    known = [first_state + i for i in range(tokens - 1)]
    ends = frozenset({7} if ended else ())
    states = [torch.tensor([x]) for x in known]
    return WrongBranch(
        position, tokens, [7] * tokens, [(-x, 0.5) for x in known], ends, states=states
    )


def trace_of(
    accepted: list[int],
    ends: bool = False,
    room: int = 100,
    depth: int = 4,
    branches: list[WrongBranch] | None = None,
    entropies: list[float] | None = None,
    largest: list[float] | None = None,
    lag: int = 1,
) -> Trace:
    """One toss of the coins over an output; states are 0, 1, 2, ... along it."""
    length = len(accepted)
    places = np.arange(length)
    path = AcceptedPath(
        limit=room - 1 - places,
        ends=(places == length - 1) & ends,
        lag=lag,
        states=torch.arange(float(length))[:, None],
        rows=torch.tensor([entropies or [0.0] * length, largest or [1.0] * length]).T,
    )
    if branches is None:
        branches = [branch(i, depth, first_state=100.0 * (i + 1)) for i in range(length)]
    wrong = [one for one in branches if not accepted[one.position]]
    return join(path, run_lengths(np.array([accepted], dtype=bool)), [wrong], depth)


def totals(trace: Trace, candidates, acceptance=None) -> list[tuple[int, ...]]:
    """(tokens, rounds, drafted, accepted, passes) of each policy."""
    counts = replay(trace, acceptance or {}, candidates)
    facts = (counts.tokens, counts.rounds, counts.drafted, counts.accepted, counts.passes)
    return [tuple(int(fact[0, i]) for fact in facts) for i in range(len(candidates))]


def test_the_first_rejection_is_sought_at_or_after_each_position():
    coins = np.array([[1, 0, 1, 1, 0, 1]], dtype=bool)
    assert first_rejection(coins).tolist() == [[1, 1, 4, 4, 4, 6]]


def test_rounds_of_fixed_lengths_by_hand():
    # accepted: 0 1, rejected: 2, accepted: 3 4 5, rejected: 6, accepted: 7; no EOS, room to spare
    trace = trace_of([1, 1, 0, 1, 1, 1, 0, 1], room=8)
    assert totals(trace, FIXED) == [
        # k=1: rounds at 0 (accept, bonus 1), 2 (reject), 3, 5 (accept 5, bonus 6), 7 (no room)
        (8, 5, 4, 3, 4),
        # k=2: 0 (0 1 + 2), 3 (3 4 + 5), 6 (rejected; one token of room: drafts 1), 7 (nothing)
        (8, 4, 5, 4, 5),
        # k=3: 0 (2 of 3), 3 (3 of 3 + 6), 7 (nothing)
        (8, 3, 6, 5, 6),
        # k=4: 0 (2 of 4), 3 (3 of 4), 7 (nothing)
        (8, 3, 8, 5, 8),
    ]


def test_a_drafted_eos_ends_the_draft_and_gives_no_bonus():
    trace = trace_of([1, 1, 1], ends=True)
    # k=2: drafts 0 1, bonus is EOS. k=3, 4: drafts 0 1 EOS and stops there
    assert totals(trace, FIXED)[1:] == [(3, 1, 2, 2, 2), (3, 1, 3, 3, 3), (3, 1, 3, 3, 3)]


def test_the_identity_of_passes_breaks_by_one_where_eos_lies_inside_the_draft():
    trace = trace_of([1, 1, 1], ends=True)
    for candidate, missing in zip(FIXED, (1, 0, 1, 1), strict=True):
        [(tokens, rounds, drafted, accepted, _)] = totals(trace, [candidate])
        assert drafted + rounds == tokens + (drafted - accepted) + missing


def test_eos_as_the_correction_ends_the_output():
    trace = trace_of([1, 0], ends=True)
    assert totals(trace, FIXED[2:3]) == [(2, 1, 3, 1, 3)]


def test_a_token_that_only_the_drafter_takes_for_eos_stops_it_on_the_way():
    path = AcceptedPath(
        np.full(4, 99), np.array([0, 1, 0, 0], dtype=bool), 1, torch.zeros(4, 1), torch.zeros(4)
    )
    trace = join(path, run_lengths(np.ones((1, 4), dtype=bool)), [[]], depth=4)
    assert trace.longest[0, :2].tolist() == [2, 1]


def test_an_eos_drawn_in_a_wrong_branch_stops_drafting():
    ended = [branch(1, 2, ended=True)]
    trace = trace_of([1, 0, 1], branches=ended, depth=8)
    assert trace.longest.tolist() == [[3, 2, 8]]
    assert totals(trace, [Candidate("fixed", 8)]) == [(3, 2, 11, 2, 11)]


def test_drafts_leave_room_for_the_one_token_that_follows():
    trace = trace_of([1, 1, 1, 1], room=4)
    assert trace.longest.tolist() == [[3, 2, 1, 0]]
    assert totals(trace, FIXED[3:]) == [(4, 1, 3, 3, 3)]


def test_the_oracle_discards_nothing_and_calls_the_target_once_a_disagreement():
    generator = np.random.default_rng(0)
    for _ in range(20):
        accepted = generator.random(40) < 0.7
        trace = trace_of(accepted.tolist(), ends=True, depth=8)
        tokens, rounds, drafted, kept, _ = totals(trace, [Candidate("oracle")])[0]
        disagreements = int((~accepted).sum())
        assert (tokens, drafted - kept) == (40, 0)
        assert rounds == disagreements + int(accepted[-1])  # |S| + [N not in S]


def test_a_head_is_asked_with_a_lag_of_one_token():
    # states 0 1 2 ... have acceptance .9, but .4 at state 1
    trace = trace_of([1] * 6, depth=5)
    probs = np.full(len(trace.states), 0.9)
    probs[1] = 0.4
    heads = [Candidate("head", h, "D", max_draft=5) for h in (0.05, 0.3, 0.62, 0.64, 0.7)]
    lengths = draft_lengths(trace, {"D": probs}, heads)[:, 0, 0]
    # 1 - product over the states known: .1 after one, .64 after two, .676, .7084
    assert lengths.tolist() == [2, 3, 3, 4, 5]


def test_states_of_tokens_as_they_were_drawn_have_no_lag():
    trace = trace_of([1] * 6, depth=5, lag=0)
    probs = np.full(len(trace.states), 0.9)
    probs[1] = 0.4
    heads = [Candidate("head", h, "D", max_draft=5) for h in (0.05, 0.3, 0.62, 0.64, 0.7)]
    lengths = draft_lengths(trace, {"D": probs}, heads)[:, 0, 0]
    assert lengths.tolist() == [1, 2, 2, 3, 4]


@pytest.mark.parametrize(("lag", "judged"), [(0, [1, 2, 4]), (1, [1, 2, 3])])
def test_the_head_judges_what_it_is_asked_about(lag, judged):
    """One round of a long output: stopped after 1 or 2 tokens by opinion, after 5 by the cap."""
    trace = trace_of([0] * 6, depth=5, lag=lag)
    heads = [Candidate("head", h, "D", max_draft=5) for h in (0.05, 0.15, 0.99)]
    counts = [
        replay(trace, {"D": np.full(len(trace.states), 0.9)}, [candidate]) for candidate in heads
    ]
    per_round = [float(one.judged[0, 0] / one.rounds[0, 0]) for one in counts]
    assert per_round == judged


def test_after_a_rejection_the_head_reads_the_states_of_the_wrong_branch():
    trace = trace_of([1, 0, 1, 1], depth=4)
    seen = trace.states[torch.from_numpy(trace.index[0, 0, :4].astype(np.int64))][:, 0].tolist()
    assert seen == [0.0, 200.0, 201.0, 202.0]
    assert trace.index[0, 1].tolist()[3] == -1  # the last drafted token's state is never asked for
    seen = trace.states[torch.from_numpy(trace.index[0, 2, :2].astype(np.int64))][:, 0].tolist()
    assert seen == [2.0, 3.0]


def test_the_entropy_policy_stops_after_a_row_above_the_threshold():
    trace = trace_of([1] * 5, entropies=[0.5, 1.5, 0.5, 3.0, 0.5], depth=4)
    candidates = [Candidate("entropy", nats, max_draft=4) for nats in (0.1, 1.0, 1.5, 5.0)]
    lengths = draft_lengths(trace, {}, candidates)[:, 0, 0]
    assert lengths.tolist() == [1, 2, 4, 4]


def test_the_cumulative_policy_stops_once_the_product_is_small():
    trace = trace_of([1] * 5, largest=[0.9, 0.5, 0.9, 0.9, 0.9], depth=4)
    candidates = [Candidate("cumulative", least, max_draft=4) for least in (0.95, 0.6, 0.42, 0.1)]
    # after 0.9 and 0.45 and 0.405; a row is known by drafting from it
    assert [int(n) for n in draft_lengths(trace, {}, candidates)[:, 0, 0]] == [1, 2, 3, 4]


def test_a_logistic_is_played_round_by_round_and_learns_from_rejections():
    trace = trace_of([0] * 3, depth=4)  # rows of rejected tokens: 0.5
    lengths = draft_lengths(trace, {}, [Candidate("logistic", 0.55, max_draft=4)])
    # 1 - 0.5 and 1 - 0.5 ** 2; then a = -0.5 / 1.25 and 1 - sigmoid(a) = 0.599
    assert lengths[0, 0].tolist() == [2, 1, 1]


def test_several_tosses_are_summed():
    path = AcceptedPath(
        np.full(3, 99), np.zeros(3, dtype=bool), 1, torch.zeros(3, 1), torch.zeros(3, 2)
    )
    coins = np.array([[1, 1, 1], [0, 0, 0]], dtype=bool)
    wrong = [branch(i, 4) for i in range(3)]
    trace = join(path, run_lengths(coins), [[], wrong], depth=4)
    assert totals(trace, FIXED[:1]) == [(6, 5, 5, 2, 5)]


def test_a_policy_longer_than_the_trace_is_refused_by_name():
    with pytest.raises(ValueError, match="policy k=9 may draft 9 tokens, but the trace was logged"):
        draft_lengths(trace_of([1, 1]), {}, [Candidate("fixed", 9)])
