"""Calibration of heads on soft labels, Theorem 3.1 and the oracle, computed by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from drafttrain.build.pairs import make_drafter
from drafttrain.config.decode import SamplingConfig
from drafttrain.decoding.types import Output, Round
from drafttrain.evaluation.calibration import (
    area_under_curve,
    binary_kl,
    calibration_error,
    follow_oracle,
    oracle_counts,
    reliability,
    stop_threshold,
)
from drafttrain.evaluation.metrics import call_seconds
from drafttrain.evaluation.prompts import Prompt
from tests.evaluation.scripted import loaded, plain_tokens
from tests.tiny_drafters import noisy
from tests.tiny_models import tiny_model, tiny_source


def test_binary_kl_by_hand_with_zero_log_zero():
    found = binary_kl(np.array([0.0, 1.0, 0.5, 0.25]), np.array([0.5, 0.5, 0.5, 0.75]))
    assert found == pytest.approx([np.log(2), np.log(2), 0.0, 0.5 * np.log(3)])
    assert binary_kl(np.array([1.0, 0.0]), np.array([1.0, 0.0])).tolist() == [0.0, 0.0]


def test_calibration_error_weighs_bins_by_their_positions():
    predicted, labels = np.array([0.1, 0.1, 0.1, 0.9]), np.array([0.2, 0.3, 0.4, 0.5])
    assert calibration_error(labels, predicted) == pytest.approx(0.75 * 0.2 + 0.25 * 0.4)


def test_reliability_has_means_of_the_bins_that_hold_positions():
    found = reliability(np.array([0.2, 0.4, 1.0]), np.array([0.91, 0.93, 1.0]))
    assert found.positions == [2, 1]  # bins of 1/15; 1 is in the last one
    assert found.predicted == pytest.approx([0.92, 1.0])
    assert found.observed == pytest.approx([0.3, 1.0])


def test_auc_of_soft_labels_is_that_of_positions_split_in_two():
    generator = np.random.default_rng(0)
    labels, predicted = generator.random(20), generator.random(20).round(1)
    above, ties = predicted[:, None] > predicted, predicted[:, None] == predicted
    pairs = labels[:, None] * (1 - labels)
    expected = (pairs * (above + 0.5 * ties)).sum() / pairs.sum()
    assert area_under_curve(labels, predicted) == pytest.approx(expected)
    assert np.isnan(area_under_curve(np.ones(3), np.ones(3)))


def test_the_threshold_of_theorem_3_1():
    paper = 0.0234, 0.112  # t_draft, t_target
    assert stop_threshold(*paper) == pytest.approx((0.112 - 0.0234) / 0.112)
    assert stop_threshold(5.0, 1.0) is None


def test_seconds_are_those_of_the_rounds_own_clocks():
    def played(drafted: int) -> Round:
        seconds = {"draft_seconds": 0.002 * drafted, "target_seconds": 0.011}
        return Round(0, [1] * drafted, [], [1], **seconds)

    outputs = [Output([1, 1], [played(3), played(1)]), Output([1], [played(0)])]
    assert call_seconds(outputs) == pytest.approx((0.002, 0.011))


def test_the_oracle_stops_before_each_disagreement():
    # tokens 0 1 | 2 | 3 4 5: wrong at 1 and 2; the last token is the target's
    right = np.array([True, False, False, True, True, True])
    agrees = np.stack([np.pad(right[p : p + 4], (0, max(0, p - 2))) for p in range(6)])
    counts = oracle_counts([agrees])
    assert (counts.tokens, counts.drafted, counts.target_calls) == (6, 3, 3)
    short = oracle_counts([agrees[:, :1]])  # rounds of one draft token
    assert (short.drafted, short.target_calls) == (2, 4)
    assert oracle_counts([np.ones((4, 9), dtype=bool)]).target_calls == 1


def test_the_oracle_of_a_language_model_reads_its_own_tokens():
    model = tiny_model("llama")
    drafter = noisy(model, "llama", 0.3)
    ids = [5, 9, 12, 7]
    tokens = plain_tokens(model, ids, 12)
    with torch.inference_mode():
        rows = drafter(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    right = (rows.argmax(-1) == torch.tensor(tokens)).tolist()
    wrong = sum(not one for one in right[:-1])
    prompt = Prompt(0, "", None, tiny_source(ids, model))
    pair = replace(loaded(model), drafters={"small": make_drafter(drafter)})
    found = follow_oracle(pair, SamplingConfig(max_new_tokens=12), [prompt], longest=20)
    assert (found.tokens, found.target_calls) == (len(tokens), wrong + 1)
    assert found.drafted == len(tokens) - found.target_calls
