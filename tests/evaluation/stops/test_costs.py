"""Costs from decoding runs, and what Equations 2.1 to 2.3 make of them."""

import numpy as np
import pytest

from drafttrain.decoding.types import Output, Round
from drafttrain.evaluation.stops.costs import Costs, fit_costs, threshold_from_costs
from drafttrain.evaluation.stops.policy_results import ORACLE, Prices, best_of, policy_results
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts


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


def test_what_a_slot_costs_is_read_from_the_rounds_own_clocks():
    outputs = [run_of(k, 3 + i, 0.002, 0.011, 0.0) for k in (2, 6) for i in range(3)]
    assert fit_costs(outputs, block=True).t_slot == pytest.approx(0.002)
    assert fit_costs(outputs).t_slot == 0.0


def test_the_threshold_of_theorem_3_1():
    assert threshold_from_costs(0.0234, 0.112) == pytest.approx((0.112 - 0.0234) / 0.112)
    assert threshold_from_costs(1.0, 5.0, delta=2.0) == pytest.approx(6 / 7)


def test_equation_2_3_is_equation_2_1_divided_by_the_tokens():
    costs = Costs(0.02, 0.1, 0.0, 1.0, 1)
    tokens, discarded, calls = 100.0, 30.0, 25.0
    drafted = tokens + discarded - calls  # N_draft + N_target = N + N_discarded
    seconds = costs.seconds(drafted, calls)
    c1, c2 = costs.t_draft, costs.t_target - costs.t_draft
    latency = c1 + c1 * discarded / tokens + c2 * calls / tokens
    assert latency == pytest.approx(seconds / tokens)


def counts_of(**columns) -> PolicyCounts:
    """Two prompts; each fact is a row of policies, the same for both prompts."""
    facts = {name: np.array([row, row], dtype=float) for name, row in columns.items()}
    facts.setdefault("computed", facts["drafted"])
    facts.setdefault("passes", facts["drafted"])
    return PolicyCounts(**facts)


CANDIDATES = [Candidate("fixed", 2), Candidate("head", 0.5, "D"), ORACLE]
COUNTS = counts_of(
    tokens=[12, 12, 12], rounds=[6, 4, 3], drafted=[12, 10, 9], accepted=[6, 8, 9], judged=[0, 6, 0]
)


def test_gains_regret_and_share_by_hand():
    prices = Prices(Costs(1.0, 5.0, 0.0, 1.0, 1), 0.2, heads={"D": 0.5})
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
    prices = Prices(Costs(1.0, 5.0, 0.0, 1.0, 1), 0.2, heads={"D": 0.5})
    head = policy_results(COUNTS, CANDIDATES, prices, CANDIDATES[0], 20)[1]
    gain = head.metrics["gain"]
    assert gain.low == pytest.approx(gain.high)


def test_slots_behind_the_stop_are_paid_for():
    costs = Costs(1.0, 5.0, 0.0, 1.0, 1, t_slot=0.25)
    assert costs.seconds(np.array([4.0]), np.array([2.0]), np.array([10.0])) == pytest.approx(15.5)
