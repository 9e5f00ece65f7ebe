"""Hand-computed numbers for every acceptance metric."""

from types import SimpleNamespace

import numpy as np
import pytest

from drafttrain.decoding.types import Calls, Output, Round
from drafttrain.evaluation.bootstrap import draw_resamples, estimate, estimate_all
from drafttrain.evaluation.metrics import (
    CallCosts,
    acceptance_figures,
    count_positions,
    count_rounds,
    first_difference,
    identical,
    position_rates,
    speed_figures,
    walltime_improvement,
)
from drafttrain.evaluation.runner import Decoded

EOS = 1
DRAFTER = object()


def round_of(drafted, accepted, emitted, finished=False):
    return Round(0, drafted, range(accepted), emitted, passes=1, finished=finished)


def output_of(*rounds):
    return Output([token for round in rounds for token in round.emitted], list(rounds))


def values_of(counts, parameter_ratios=None):
    resamples = draw_resamples(len(counts.tokens), 10)
    found = estimate_all(acceptance_figures(counts, parameter_ratios), resamples)
    return {name: estimate.value for name, estimate in found.items()}


# Prompt 1: all four accepted and a bonus token, then the first rejected, then EOS as correction.
ORDINARY = output_of(
    round_of([5, 6, 7, 8], 4, [5, 6, 7, 8, 9]),
    round_of([4, 4, 4, 4], 0, [3]),
    round_of([2, 9, 9, 9], 1, [2, EOS], finished=True),
)
# Prompt 2: EOS is the second draft token; the verifier accepted three, of which two count.
EOS_IN_DRAFT = output_of(round_of([7, EOS, 6, 6], 3, [7, EOS], finished=True))
# Prompt 3: the maximal length cuts a round with four accepted tokens after three.
CUT = output_of(round_of([5, 5, 5, 5], 4, [5, 5, 5], finished=True))


def test_counts_of_a_round_exclude_tokens_after_eos():
    counts = count_rounds([ORDINARY, EOS_IN_DRAFT, CUT])
    expected = {"tokens": [8, 2, 3], "rounds": [3, 1, 1], "passes": [3, 1, 1]}
    expected |= {"drafted": [12, 4, 4], "accepted": [5, 2, 3], "discarded": [7, 2, 1]}
    assert {name: getattr(counts, name).tolist() for name in expected} == expected


def test_rates_are_ratios_of_sums():
    outputs = [ORDINARY, EOS_IN_DRAFT, CUT]
    assert values_of(count_rounds(outputs), {"drafter": 0.5}) == pytest.approx(
        {
            "mean_acceptance_length": 13 / 5,
            "acceptance_rate": 10 / 20,
            "discard_rate": 10 / 13,
            "verification_rate": 5 / 13,
            "mbsu": (13 / 5) / (1 * 0.5 + 1),
        }
    )


def test_plain_decoding_emits_one_token_a_round_and_has_no_acceptance_rate():
    plain = output_of(round_of([], 0, [5]), round_of([], 0, [EOS], finished=True))
    found = values_of(count_rounds([plain]))
    assert found["mean_acceptance_length"] == found["verification_rate"] == 1.0
    assert "acceptance_rate" not in found
    assert position_rates(count_positions([plain]), draw_resamples(1, 10)) is None


def test_acceptance_by_position_counts_all_rounds_and_conditional_only_those_that_got_there():
    outputs = [ORDINARY, EOS_IN_DRAFT, CUT]
    rates = position_rates(count_positions(outputs), draw_resamples(3, 10))
    assert rates.drafted == [5, 5, 5, 5]
    assert rates.accepted == [4, 3, 2, 1]
    # position 2: only the rejected round stopped before it
    assert rates.reached == [5, 4, 2, 1]
    assert [rate.value for rate in rates.conditional] == pytest.approx([0.8, 0.75, 1.0, 1.0])


def test_a_position_that_no_round_reached_has_no_conditional_acceptance():
    counts = count_positions([output_of(round_of([4, 4], 0, [EOS], finished=True))])
    rates = position_rates(counts, draw_resamples(1, 10))
    assert rates.conditional[0].value == 0.0
    assert rates.conditional[1] is None


def tree_round(expected, path, emitted, nodes=6, depth=2):
    """Returns a round with a tree and one drafter call per level."""
    return Round(0, range(nodes), path, emitted, depth=depth, expected=expected, passes=depth)


# Both levels accepted; then a leaf on level 1 accepted, while level 2 is on another branch.
TREES = output_of(tree_round(1.5, [1, 4], [1, 4, 9]), tree_round(0.5, [0], [0, 9]))
ONE_LEVEL_THEN_NONE = output_of(tree_round(0.25, [], [9], 3, 1), Round(0, [], [], [EOS]))


def test_a_trees_nodes_count_as_drafted_and_its_levels_as_drafter_calls():
    assert values_of(count_rounds([TREES]), {"drafter": 0.25}) == pytest.approx(
        {
            "mean_acceptance_length": 5 / 2,
            "expected_accepted": 2 / 2,
            "acceptance_rate": 3 / 12,
            "discard_rate": 9 / 5,
            "verification_rate": 2 / 5,
            "mbsu": (5 / 2) / (2 * 0.25 + 1),
        }
    )


def test_positions_of_a_tree_are_its_levels_and_mbsu_divides_by_the_mean_depth():
    found = values_of(count_rounds([TREES, ONE_LEVEL_THEN_NONE]), {"drafter": 0.25})
    assert found["mbsu"] == pytest.approx((7 / 4) / (5 / 4 * 0.25 + 1))
    rates = position_rates(count_positions([TREES, ONE_LEVEL_THEN_NONE]), draw_resamples(2, 10))
    assert rates.drafted == [3, 2]
    assert rates.accepted == [2, 1]
    assert rates.reached == [3, 2]
    # a round without a draft has expectation 0
    assert found["expected_accepted"] == pytest.approx((1.5 + 0.5 + 0.25) / 4)
    assert "expected_accepted" not in values_of(count_rounds([ORDINARY]))


def test_first_difference_is_the_first_unequal_token_or_the_shorter_length():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None
    same = identical([Output([1, 2]), Output([1])], [Output([1, 2]), Output([1, 2])])
    assert same.tolist() == [1.0, 0.0]


def drafted_by_two(accepted: int, base: Calls, copied: Calls) -> Round:
    emitted, calls = [5, 6, 7][: accepted + 1], {"base": base, "max-gram": copied}
    return Round(0, [5, 6], range(accepted), emitted, passes=base.count, calls=calls)


def test_standardised_walltime_improvement_counts_the_calls_of_each_drafter():
    """Seven tokens, three target calls, five calls of the base at 0.1 and six copies at 0.02."""
    rounds = (
        drafted_by_two(2, Calls(2, 0.2), Calls(2, 0.04)),
        drafted_by_two(2, Calls(2, 0.2), Calls(3, 0.06)),
        drafted_by_two(0, Calls(1, 0.1), Calls(1, 0.02)),
    )
    counts = count_rounds([output_of(*rounds)])
    assert counts.calls["base"].tolist() == [5]
    by_size = {"base": 0.2, "max-gram": 0.0}
    costs = CallCosts.of(counts, by_size, 1.0)
    assert costs.measured == pytest.approx({"base": 0.1, "max-gram": 0.02})
    assert costs.calls == {"base": 5, "max-gram": 6} and costs.parameters == by_size
    swi = estimate(walltime_improvement(counts, costs.measured), draw_resamples(1, 5))
    assert swi.value == pytest.approx(7 / (3 + 0.5 + 0.12))
    assert values_of(counts, by_size)["mbsu"] == pytest.approx(7 / (3 + 1.0))


def test_the_calls_of_a_single_drafter_are_its_passes():
    first = Round(0, [5, 6], [0, 1], [5, 6, 7], passes=2, draft_seconds=0.3)
    counts = count_rounds([output_of(first, Round(0, [5], [], [9], passes=1, draft_seconds=0.3))])
    costs = CallCosts.of(counts, {"causal": 0.5}, 2.0)
    assert costs.measured == pytest.approx({"causal": 0.1}) and costs.calls == {"causal": 3}
    swi = estimate(walltime_improvement(counts, costs.measured), draw_resamples(1, 5))
    assert swi.value == pytest.approx(4 / 2.3)


def test_a_stop_policy_is_compared_with_the_fastest_fixed_length_of_its_drafter():
    def decoded(
        stop: str, seconds: list[float], drafter=DRAFTER, way: str = "chain", tau: float = 0.0
    ) -> Decoded:
        rule = SimpleNamespace(name=stop)
        method = SimpleNamespace(stop=SimpleNamespace(rule=rule), drafter=drafter, verifier=tau)
        outputs = [SimpleNamespace(tokens=[1] * 10)] * 2
        job = SimpleNamespace(way=way, method=method, lossless=tau == 0.0)
        return Decoded(job, 1, outputs, np.array([seconds]), np.array(seconds))

    fixed = [decoded("fixed", [2.0, 2.0]), decoded("fixed", [1.0, 2.0])]
    head, others = decoded("head", [1.0, 1.0]), [*fixed, decoded("fixed", [0.1, 0.1], object())]
    for sampled in (False, True):
        figures = speed_figures(head, [*others, head], sampled)
        assert estimate(figures["speedup_vs_fixed"], draw_resamples(2)).value == 1.5
    for run in (*fixed, decoded("gain", [1.0, 1.0], way="opt-tree")):
        assert "speedup_vs_fixed" not in speed_figures(run, others, False)
    others += [decoded("fixed", [0.2, 0.2], tau=2.0), decoded("fixed", [0.1, 0.1], tau=3.0)]
    for tau, expected in ((0.0, 1.5), (2.0, 0.2)):  # lossy rules accept more
        figures = speed_figures(decoded("head", [1.0, 1.0], tau=tau), others, False)
        assert estimate(figures["speedup_vs_fixed"], draw_resamples(2)).value == expected
