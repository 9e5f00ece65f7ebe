"""What policies cost, and what Equations 2.1 to 2.3 make of it."""

from dataclasses import replace

import numpy as np
import pytest

from drafttrain.decoding.types import Output, Round
from drafttrain.evaluation.runner import Decoded
from drafttrain.evaluation.stops.policy_results import (
    ORACLE,
    batch_choice,
    best_of,
    policy_results,
)
from drafttrain.evaluation.stops.prices import Prices, RuleCost
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts
from drafttrain.evaluation.stops.round_costs import Curve, RoundCosts, round_costs
from tests.evaluation.stops.timed import run_of


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


def test_of_heads_alike_the_one_with_fewest_layers_is_taken():
    prices = prices_of(1.0, 5.0, heads={"D0": 0.5, "D1": 0.5, "D2": 0.5})
    candidates = [Candidate("fixed", 2), *(Candidate("head", 0.5, f"D{n}") for n in (2, 1, 0))]
    depths = {"D0": 0, "D1": 1, "D2": 2}
    # seconds: fixed 42; heads 10 + 20 + .5 judged = 33, and a little more, or much more
    for slower, expected in ((0.6, 3), (0.7, 2), (1.5, 1)):
        counts = counts_of(
            tokens=[12] * 4,
            rounds=[6, 4, 4, 4],
            drafted=[12, 10, 10, 10],
            accepted=[6, 8, 8, 8],
            judged=[0, 6, 6 + (1 if slower > 1 else 0.5), 6 + slower],
        )
        found = best_of(counts, candidates, prices, ("fixed", "head"), depths=depths)
        assert found == candidates[expected], slower
        assert best_of(counts, candidates, prices, ("fixed", "head")) == candidates[1]
        assert best_of(counts, candidates, prices, ("fixed",), depths=depths) == candidates[0]


def test_no_share_where_the_oracle_gains_nothing():
    slow = counts_of(
        tokens=[12] * 3, rounds=[6, 4, 6], drafted=[12, 10, 12], accepted=[6, 8, 6], judged=[0] * 3
    )
    prices = prices_of(1.0, 5.0, heads={"D": 0.0})
    found = policy_results(slow, CANDIDATES, prices, CANDIDATES[0], 20)
    assert found[1].metrics["gain"].value > 0.0 and found[2].metrics["gain"].value == 0.0
    assert all("oracle_share" not in one.metrics for one in found)


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
