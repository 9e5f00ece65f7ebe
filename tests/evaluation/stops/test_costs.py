"""Costs from decoding runs, and what Equations 2.1 to 2.3 make of them."""

from dataclasses import replace

import numpy as np
import pytest

from drafttrain.decoding.types import Output, Round
from drafttrain.evaluation.runner import Decoded
from drafttrain.evaluation.stops.costs import (
    Prices,
    RuleCost,
    fit_costs,
    round_costs,
    threshold_from_costs,
    timed_lengths,
)
from drafttrain.evaluation.stops.policy_results import (
    ORACLE,
    batch_choice,
    best_of,
    policy_results,
)
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts
from drafttrain.evaluation.stops.round_costs import Curve, RoundCosts


def run_of(k: int, rounds: int, t_draft: float, t_target: float, constant: float) -> Output:
    """One prompt decoded in rounds of k drafted tokens that take known times."""
    played = [
        Round(0, range(k), range(1), range(2), k, k * t_draft, t_target) for _ in range(rounds)
    ]
    return Output(list(range(2 * rounds)), played, rounds * (k * t_draft + t_target) + constant)


def test_the_fit_recovers_known_costs():
    outputs = [run_of(k, 3 + i, 0.002, 0.011, 0.05) for k in (2, 6, 14) for i in range(5)]
    costs = fit_costs(outputs)
    assert costs.t_draft == pytest.approx(0.002)
    assert costs.t_target == pytest.approx(0.011)
    assert costs.constant == pytest.approx(0.05)
    assert costs.r_squared == pytest.approx(1.0)
    assert costs.draft_mean == pytest.approx(0.002) and costs.target_mean == pytest.approx(0.011)


def test_noise_lowers_r_squared():
    generator = np.random.default_rng(0)
    outputs = [run_of(k, 3 + i, 0.002, 0.011, 0.05) for k in (2, 6, 14) for i in range(20)]
    for output in outputs:
        output.seconds += generator.normal(scale=0.02)
    costs = fit_costs(outputs)
    assert 0.9 < costs.r_squared < 0.999
    assert costs.t_target == pytest.approx(0.011, rel=0.3)


def test_one_length_does_not_tell_the_costs_apart():
    with pytest.raises(ValueError, match="do not tell t_draft and t_target apart"):
        fit_costs([run_of(4, 3 + i, 0.002, 0.011, 0.0) for i in range(5)])


def test_what_a_busy_machine_makes_impossible_is_read_from_the_rounds_own_clocks():
    outputs = [run_of(k, 3 + i, 0.002, 0.011, 0.05) for k in (2, 6, 14) for i in range(5)]
    for output in outputs[:5]:  # other work while the shortest drafts ran
        output.seconds *= 9
    costs = fit_costs(outputs)
    assert costs.r_squared is None and costs.constant == 0.0
    assert costs.t_draft == pytest.approx(0.002) and costs.t_target == pytest.approx(0.011)


def test_what_a_slot_costs_is_read_from_the_rounds_own_clocks():
    outputs = [run_of(k, 3 + i, 0.002, 0.011, 0.0) for k in (2, 6) for i in range(3)]
    assert fit_costs(outputs, block=True).t_slot == pytest.approx(0.002)
    assert fit_costs(outputs).t_slot == 0.0


def test_the_threshold_of_theorem_3_1():
    assert threshold_from_costs(0.0234, 0.112) == pytest.approx((0.112 - 0.0234) / 0.112)
    assert threshold_from_costs(1.0, 5.0, delta=2.0) == pytest.approx(6 / 7)


def counts_of(**columns) -> PolicyCounts:
    """Two prompts; each fact is a row of policies, the same for both prompts.

    Drafts are counted as so many of one token: what costs nothing beside its tokens, costs that.
    """
    facts = {name: np.array([row, row], dtype=float) for name, row in columns.items()}
    nothing = np.zeros_like(facts["drafted"])
    facts.setdefault("computed", facts["drafted"])
    facts.setdefault("passes", facts["drafted"])
    facts.setdefault("by_computed", np.stack([nothing, facts["computed"]], axis=-1))
    facts.setdefault("by_rows", np.stack([nothing, facts["rounds"]], axis=-1))
    for name in ("history", "drafter_history"):
        facts.setdefault(name, nothing)
    facts.setdefault("sequences", nothing + 1.0)
    facts.setdefault("drafting", nothing[..., None])
    return PolicyCounts(**facts)


def prices_of(t_draft: float, t_target: float, constant: float = 0.0, **others) -> Prices:
    """A drafted token and a target call of known costs; plain decoding: 0.2 tokens a second."""
    draft, target = Curve(0.0, (0.0,), (t_draft,)), Curve(t_target, (1.0,), (0.0,))
    return Prices({1: RoundCosts(1, draft, target, constant, 0.2, 0.0)}, **others)


CANDIDATES = [Candidate("fixed", 2), Candidate("head", 0.5, "D"), ORACLE]
COUNTS = counts_of(
    tokens=[12, 12, 12], rounds=[6, 4, 3], drafted=[12, 10, 9], accepted=[6, 8, 9], judged=[0, 6, 0]
)


def test_gains_regret_and_share_by_hand():
    prices = prices_of(1.0, 5.0, heads={"D": 0.5})
    # seconds: fixed 12 + 30 = 42; head 10 + 20 + 6 * .5 = 33; oracle 9 + 15 = 24
    assert best_of(COUNTS, CANDIDATES, prices, ("fixed", "head")) == CANDIDATES[1]
    fixed, head, oracle = policy_results(COUNTS, CANDIDATES, prices, CANDIDATES[0], 20)
    assert fixed.metrics["tokens_per_second"].value == pytest.approx(12 / 42)
    assert head.metrics["gain"].value == pytest.approx(42 / 33 - 1)
    assert head.metrics["regret"].value == pytest.approx(1 - 24 / 33)
    share = (1 / 33 - 1 / 42) / (1 / 24 - 1 / 42)
    assert head.metrics["oracle_share"].value == pytest.approx(share)
    assert head.metrics["speedup"].value == pytest.approx(12 / 33 / 0.2)
    assert oracle.metrics["discard_rate"].value == 0.0
    assert "oracle_share" not in fixed.metrics and "oracle_share" not in oracle.metrics


def test_equal_prompts_leave_no_doubt_about_a_gain():
    prices = prices_of(1.0, 5.0, heads={"D": 0.5})
    head = policy_results(COUNTS, CANDIDATES, prices, CANDIDATES[0], 20)[1]
    gain = head.metrics["gain"]
    assert gain.low == pytest.approx(gain.high)


def test_a_rule_a_policy_and_a_sequence_are_paid_for():
    candidate = Candidate("head", 0.5, "D", verifier="block")
    rules = {"block": RuleCost(call=2.0, token=0.5)}
    prices = prices_of(1.0, 5.0, constant=7.0, heads={"D": 0.5}, rules=rules)
    # 10 tokens and 4 calls as before, 6 judged, 4 * 2 + 10 * .5 of the rule, 7 of the sequence
    seconds = prices.seconds(COUNTS, 1, candidate)
    assert seconds == pytest.approx([33 + 13 + 7] * 2)


def test_slots_behind_the_stop_are_paid_for():
    counts = counts_of(tokens=[8], rounds=[2], drafted=[4], accepted=[4], judged=[0], computed=[10])
    seconds = prices_of(1.0, 5.0).seconds(counts, 0, Candidate("fixed", 2))
    assert seconds == pytest.approx([10 + 10] * 2)


def test_rounds_of_a_batch_last_as_long_as_the_longest_draft_in_it():
    """Each prompt has a round of 1 drafted token and one of 3; half of the others' are of 3."""
    counts = counts_of(tokens=[6], rounds=[2], drafted=[4], accepted=[4], judged=[0])
    computed, rows = np.zeros((2, 1, 4)), np.zeros((2, 1, 5))
    computed[..., [1, 3]], rows[..., [2, 4]] = 1.0, 1.0
    counts = replace(counts, by_computed=computed, by_rows=rows)
    each = Curve(0.0, (0.0,), (1.0,))  # a second a token, and a row
    prices = Prices({size: RoundCosts(size, each, each, 0.0, 0.2, 0.0) for size in (1, 2)})
    assert prices.seconds(counts, 0, CANDIDATES[0], 1) == pytest.approx([1 + 3 + 2 + 4] * 2)
    assert prices.seconds(counts, 0, CANDIDATES[0], 2) == pytest.approx([2 + 3 + 3 + 4] * 2)


def test_what_is_best_depends_on_the_batch_size():
    slow = Curve(0.0, (1.0,), (4.0,))  # a row more takes as long as a call: drafts do not pay
    many = RoundCosts(8, Curve(0.0, (0.0,), (1.0,)), slow, 0.0, 0.3, 0.0)
    prices = prices_of(1.0, 5.0, heads={"D": 0.0})
    prices = Prices({**prices.rounds, 8: many}, heads={"D": 0.0})
    rows = np.zeros((2, 3, 8))
    rows[:, 0, 3], rows[:, 1, 7], rows[:, 2, 5] = 6, 4, 3  # 2 and 6 tokens a draft; the oracle's
    counts = replace(COUNTS, by_rows=rows)
    choices = [batch_choice(counts, CANDIDATES, prices, size, 20) for size in (1, 8)]
    assert [one.best for one in choices] == ["D head(0.5)", "k=2"]
    # at 8, slots of 4 from the first row on: 12 + 6 * 8 = 60; the oracle 9 + 3 * 16 = 57
    assert choices[1].gain.value == 0.0
    assert choices[1].regret.value == pytest.approx(1 - 57 / 60)


def played(k: int, rounds: int, shared_by: int = 2) -> Output:
    """One sequence whose rounds take 3 + 2 k + 1 a row more + 0.01 a token in front (and of the
    drafter's calls 0.001), the first one 9 more."""
    found, front = [], 4
    for number in range(rounds):
        found.append(
            Round(
                0, range(k), range(1), range(2), k, 2.0 * k + 0.001 * k * front,
                3.0 + k + 0.01 * front + (9.0 if number == 0 else 0.0), shared_by=shared_by,
            )
        )  # fmt: skip
        front += 2
    seconds = sum(round.draft_seconds + round.target_seconds for round in found)
    return Output(list(range(2 * rounds)), found, seconds)


def test_rounds_are_predicted_from_their_counts_at_a_batch_size():
    runs = []
    for k in (0, 2, 5, 9):
        outputs = [played(k, rounds) for rounds in (8, 11)]
        seconds = np.array([[output.seconds for output in outputs]])
        runs.append(Decoded(f"k={k}", "chain", None, outputs, seconds))
    costs = round_costs(runs, [4, 4], 2, reads_each=True)
    assert costs.draft.at(7) == pytest.approx(14.0)
    assert costs.draft.per_history == pytest.approx(0.001)
    assert costs.target.at(np.array([1, 8])) == pytest.approx([3.0, 10.0])
    assert costs.target.per_history == pytest.approx(0.01)
    assert costs.constant == pytest.approx(9.0)
    assert costs.error == pytest.approx(0.0, abs=1e-9)
    plain = runs[0].outputs
    assert costs.plain_tokens_per_second == pytest.approx(38 / sum(o.seconds for o in plain))


def test_a_disturbed_round_makes_plain_decoding_no_slower():
    """As it makes no candidate slower: speed-ups are of the same prices."""
    speeds = []
    for disturbance in (0.0, 500.0):
        runs = []
        for k in (0, 2, 5):
            outputs = [played(k, rounds) for rounds in (8, 11, 9)]
            if k == 0:
                round = outputs[1].rounds[6]
                object.__setattr__(round, "target_seconds", round.target_seconds + disturbance)
            extra = np.array([0.0, disturbance if k == 0 else 0.0, 0.0])
            seconds = np.array([[output.seconds for output in outputs]]) + extra
            runs.append(Decoded(f"k={k}", "chain", None, outputs, seconds))
        speeds.append(round_costs(runs, [4] * 3, 2, reads_each=True).plain_tokens_per_second)
    assert speeds[1] == pytest.approx(speeds[0])


def test_what_a_sequence_takes_beside_its_rounds_is_not_what_a_wave_ends_with():
    """Two sequences of plain decoding, 4 and 6 rounds: of a shared round each takes 1 s, of one
    alone 1.5 s; 2 s before the first round of each."""
    outputs = []
    for rounds in (4, 6):
        clocks = [(1.0, 2)] * 4 + [(1.5, 1)] * (rounds - 4)
        played = [
            Round(0, range(0), range(1), range(1), 0, 0.0, took, shared_by=together)
            for took, together in clocks
        ]
        seconds = sum(one.target_seconds for one in played) + 2.0
        outputs.append(Output(list(range(rounds)), played, seconds))
    seconds = np.array([[output.seconds for output in outputs]])
    drafts = [[run_of(1, 8, 1.0, 1.0, 2.0), run_of(1, 8, 1.0, 1.0, 2.0)]]
    for own in drafts[0]:
        for round in own.rounds:
            object.__setattr__(round, "shared_by", 2)
    runs = [
        Decoded("plain", "plain", None, outputs, seconds),
        Decoded("k=1", "chain", None, drafts[0], np.array([[18.0, 18.0]])),
    ]
    alone, nothing = Curve(1.5, (1.0,), (0.0,)), Curve(0.0, (0.0,), (1.0,))
    one = {1: RoundCosts(1, nothing, alone, 2.0, 0.5, 0.0)}
    costs = round_costs(runs, [0, 0], 2, True, one, waves=[[0, 1]])
    assert costs.target.at(1) == pytest.approx(1.0)
    assert costs.constant == pytest.approx(2.0)
    assert costs.error == pytest.approx(0.0, abs=1e-9)
    prices = Prices(one | {2: costs})
    # 4 rounds of both, 2 of the longer one alone; a list of its own for each: none together
    tokens, before = np.array([4.0, 6.0]), np.zeros(2)
    assert prices.plain_list_seconds(tokens, before, 2, [[0, 1]]) == pytest.approx(8 + 3 + 4)
    assert prices.plain_list_seconds(tokens, before, 2, [[0], [1]]) == pytest.approx(15 + 4)
    assert prices.plain_list_seconds(tokens, before, 1, [[0], [1]]) == pytest.approx(15 + 4)


def test_a_list_of_one_at_a_time_takes_what_its_prompts_take():
    prices = prices_of(1.0, 5.0, constant=7.0, heads={"D": 0.5})
    for place, candidate in enumerate(CANDIDATES):
        each = prices.seconds(COUNTS, place, candidate)
        found = prices.list_seconds(COUNTS, place, candidate, 1, [[0], [1]])
        assert found == pytest.approx(each.sum())


def test_a_list_of_two_together_shares_its_rounds():
    draft, target = Curve(0.0, (0.0,), (1.0,)), Curve(3.0, (1.0,), (0.0,))
    prices = prices_of(1.0, 5.0, constant=1.0)
    prices = Prices({**prices.rounds, 2: RoundCosts(2, draft, target, 7.0, 0.3, 0.0)})
    # of each prompt 12 drafted tokens and 6 rounds: 12 + 18 together, 12 + 30 alone; 7 beside
    for waves, seconds in (([[0, 1]], 30 + 30 + 14), ([[0], [1]], 42 + 42 + 14)):
        found = prices.list_seconds(COUNTS, 0, CANDIDATES[0], 2, waves)
        assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("lengths", "timed"),
    [
        (range(1, 15), [1, 2, 4, 7, 14]),
        ([2, 3, 4, 5, 6, 7, 8, 10], [2, 3, 4, 7, 10]),
        ([8, 2], [2, 8]),
        ([5], [5, 10]),
    ],
)
def test_timed_lengths_lie_closer_where_they_are_short(lengths, timed):
    assert timed_lengths(list(lengths)) == timed


def test_rounds_of_batches_that_were_not_full_are_left_out():
    outputs = [played(2, 8), played(5, 8), played(2, 8, shared_by=1)]
    for round in outputs[2].rounds:
        object.__setattr__(round, "target_seconds", 100.0)
    runs = [
        Decoded("k", "chain", None, [output], np.array([[output.seconds]])) for output in outputs
    ]
    assert round_costs(runs, [4], 2, reads_each=True).target.at(3) == pytest.approx(5.0)
