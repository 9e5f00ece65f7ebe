"""Divergences and their gradients, compared with hand-computed values."""

import math

import pytest
import torch
from torch import Tensor

from drafttrain.data.batches.examples import merged_rows
from drafttrain.training.losses import DIVERGENCES

P, Q = (0.5, 0.3, 0.2), (0.25, 0.5, 0.25)
"""Target and drafter: the overlap is 0.25 + 0.3 + 0.2 = 0.75, and only for the first token is the
drafter's probability the minimum."""
KL = 0.5 * math.log(2) + 0.3 * math.log(0.6) + 0.2 * math.log(0.8)
VALUES = {"forward_kl": KL, "total_variation": 0.25}
OF_OVERLAP = (0.25 * 0.75, -0.25 * 0.5, -0.25 * 0.25)
"""Gradient of sum min(p, q) with respect to the logits: q_0 (1 - q_0), -q_0 q_1, -q_0 q_2."""
GRADIENTS = {
    "forward_kl": [q - p for p, q in zip(P, Q, strict=True)],
    "total_variation": [-g for g in OF_OVERLAP],
}


def rows(*probs: tuple[float, ...]) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def value_and_gradient(divergence, target: Tensor) -> tuple[float, list[float]]:
    logits = (rows(Q) + 3.0).requires_grad_()
    found = divergence(target, logits.log_softmax(-1))
    found.sum().backward()
    return found.item(), logits.grad[0].tolist()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_and_its_gradient_are_those_worked_out_by_hand_and_finite(name):
    value, gradient = value_and_gradient(DIVERGENCES[name], rows(P))
    assert value == pytest.approx(VALUES[name], abs=1e-12)
    assert gradient == pytest.approx(GRADIENTS[name], abs=1e-12)
    value, gradient = value_and_gradient(DIVERGENCES[name], rows(Q))  # equal rows
    assert value == pytest.approx(0.0, abs=1e-12)
    if name == "forward_kl":  # total variation has a kink there, with several subgradients
        assert gradient == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    value, gradient = value_and_gradient(DIVERGENCES[name], rows((0.6, 0.4, 0.0)))
    assert math.isfinite(value) and all(map(math.isfinite, gradient))
    apart = DIVERGENCES[name](rows((1.0, 0.0)), rows((1e-45, 1.0)))
    assert apart.isfinite().all()


def kl(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(one, other, strict=True))


OTHERS_P, OTHERS_Q = (1 / 2, 1 / 3, 1 / 6), (0.2, 0.6, 0.2)
"""Target and drafter distributions among the three tokens that are not kept."""
TOO_LOW = {
    "forward_kl": 0.3 * kl(OTHERS_P, OTHERS_Q),
    "total_variation": 0.3 - (0.1 + 0.1 + 0.05),
}


@pytest.mark.parametrize("name", TOO_LOW)
def test_top_k_rows_have_the_loss_computed_by_hand(name):
    whole = rows((0.4, 0.3, 0.15, 0.1, 0.05))
    logits = (rows((0.2, 0.3, 0.1, 0.3, 0.1)) + 3.0).requires_grad_()
    draft = logits.log_softmax(-1)
    merged = merged_rows(draft, torch.tensor([[1, 0]]))
    assert merged.exp()[0].tolist() == pytest.approx([0.3, 0.2, 0.5])
    cut = DIVERGENCES[name](rows((0.3, 0.4, 0.3)), merged)
    lost = DIVERGENCES[name](whole, draft) - cut
    assert lost.item() == pytest.approx(TOO_LOW[name])
    if name == "forward_kl":
        cut.sum().backward()
        expected = [0.2 - 0.4, 0.0, *(0.5 * (1 - 0.3 / 0.5) * q for q in OTHERS_Q)]
        assert logits.grad[0].tolist() == pytest.approx(expected)


def test_with_all_tokens_kept_nothing_is_merged_and_gradients_are_finite():
    logits = torch.tensor([[200.0, 0.0, -200.0]]).requires_grad_()
    draft = logits.log_softmax(-1)
    everything = merged_rows(draft, torch.tensor([[2, 0, 1]]), merge=False)
    assert everything[0].tolist() == draft[0, [2, 0, 1]].tolist()
    target = torch.tensor([[0.0, -torch.inf]])
    for divergence in DIVERGENCES.values():
        merged = merged_rows(draft, torch.tensor([[0]]))
        divergence(target, merged).sum().backward(retain_graph=True)
    assert logits.grad.isfinite().all()
