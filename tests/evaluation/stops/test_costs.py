"""The two means that decoding runs cost, and the threshold of Theorem 3.1."""

import numpy as np
import pytest

from drafttrain.evaluation.stops.costs import fit_costs, threshold_from_costs
from tests.evaluation.stops.timed import run_of


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
