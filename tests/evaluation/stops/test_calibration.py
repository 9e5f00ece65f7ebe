"""Binary KL, calibration error and AUC against soft labels, by hand."""

import numpy as np
import pytest
import torch

from drafttrain.decoding.shared import alone
from drafttrain.decoding.types import Proposal, Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.stops.calibration import (
    AcceptanceRecorder,
    area_under_curve,
    binary_kl,
    calibration_error,
    calibration_metrics,
    reliability,
)

ONE = np.ones((1, 1))


class Scripted:
    """A run of acceptances of known length, and always token 0."""

    def __init__(self, run: int) -> None:
        self.run = run

    def accept_run(self, probs):
        return self.run

    def categorical(self, probs):
        return torch.zeros(len(probs), dtype=torch.long)


def test_binary_kl_by_hand_with_zero_log_zero():
    found = binary_kl(np.array([0.0, 1.0, 0.5, 0.25]), np.array([0.5, 0.5, 0.5, 0.75]))
    assert found == pytest.approx([np.log(2), np.log(2), 0.0, 0.5 * np.log(3)])
    assert binary_kl(np.array([1.0, 0.0]), np.array([1.0, 0.0])).tolist() == [0.0, 0.0]


def test_calibration_error_weighs_bins_by_their_positions():
    predicted = np.array([0.1, 0.1, 0.1, 0.9])
    labels = np.array([0.2, 0.3, 0.4, 0.5])
    error = calibration_error(labels, predicted, np.zeros(4, dtype=int), ONE, bins=10)
    assert error.value == pytest.approx(0.75 * 0.2 + 0.25 * 0.4)


def test_bins_of_equal_mass_hold_equally_many():
    predicted = np.array([0.91, 0.92, 0.93, 0.94, 0.95, 0.96])
    found = reliability(predicted, predicted, bins=3, equal_mass=True)
    assert found.positions == [2, 2, 2]
    assert found.predicted == pytest.approx([0.915, 0.935, 0.955])
    assert reliability(predicted, predicted, bins=10).positions == [6]


def test_a_prediction_of_one_falls_into_the_last_bin():
    assert reliability(np.array([1.0]), np.array([1.0])).positions == [1]


def test_auc_of_hard_labels_counts_pairs():
    labels, predicted = np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.9, 0.8, 0.7, 0.7])
    # pairs (accepted, rejected): .9>.8, .9>.7, .7<.8, .7=.7
    assert area_under_curve(labels, predicted) == pytest.approx((1 + 1 + 0 + 0.5) / 4)


def test_auc_of_soft_labels_is_that_of_positions_split_in_two():
    generator = np.random.default_rng(0)
    labels, predicted = generator.random(20), generator.random(20).round(1)
    above = predicted[:, None] > predicted
    ties = predicted[:, None] == predicted
    pairs = labels[:, None] * (1 - labels)
    expected = (pairs * (above + 0.5 * ties)).sum() / pairs.sum()
    assert area_under_curve(labels, predicted) == pytest.approx(expected)
    assert area_under_curve(np.ones(3), np.ones(3)) is None


def test_intervals_are_over_prompts():
    generator = np.random.default_rng(1)
    prompt = np.repeat(np.arange(30), 20)
    predicted = generator.random(600)
    labels = np.clip(predicted + 0.1, 0, 1)
    found = calibration_metrics(labels, predicted, prompt, draw_resamples(30, 100))
    for name in ("binary_kl", "ece", "ece_equal_mass", "auc", "label_mean"):
        assert found[name].low < found[name].value < found[name].high
    assert found["ece"].value == pytest.approx(np.mean(labels - predicted), abs=1e-12)


def test_labels_are_given_the_drafted_path_and_marked_after_a_rejection():
    draft = torch.tensor([[0.5, 0.5], [0.8, 0.2], [0.4, 0.6]])
    target = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1], [0.5, 0.5]])
    proposal = Proposal.chain(torch.tensor([0, 0, 1]), draft, 3, hidden=torch.zeros(2, 4))
    recorder = AcceptanceRecorder(RejectionSampling())
    verdict = alone(recorder(proposal, target.log(), Sampling(1.0), Scripted(run=1)))
    assert verdict.path.tolist() == [0]
    # two states are known of three tokens: the last one has not been fed
    assert torch.cat(recorder.acceptance).tolist() == pytest.approx([1.0, 0.25])
    assert torch.cat(recorder.rejected_before).tolist() == [False, False]
    alone(recorder(proposal, target.log(), Sampling(1.0), Scripted(run=0)))
    assert recorder.rejected_before[1].tolist() == [False, True]


def test_the_label_of_a_slot_is_its_expected_acceptance():
    draft, target = torch.tensor([[0.8, 0.2]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    proposal = Proposal.chain(torch.tensor([1]), draft, 1, hidden=torch.zeros(3, 4))
    recorder = AcceptanceRecorder(RejectionSampling(), slots=True)
    alone(recorder(proposal, target.log(), Sampling(1.0), Scripted(run=1)))
    assert recorder.acceptance[0].tolist() == pytest.approx([0.7])


def test_greedy_labels_are_whether_the_token_is_the_targets():
    proposal = Proposal.chain(torch.tensor([1, 0]), hidden=torch.zeros(2, 4))
    recorder = AcceptanceRecorder(GreedyMatch())
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    alone(recorder(proposal, logits, Sampling(), Scripted(run=0)))
    assert recorder.acceptance[0].tolist() == [1.0, 0.0]
