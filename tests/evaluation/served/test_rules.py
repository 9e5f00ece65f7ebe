"""Each engine's acceptance, by hand on three tokens."""

import pytest
import torch

from drafttrain.evaluation.served.rules import (
    GREEDY,
    ONE_HOT,
    OWN_SAMPLE,
    REJECTION,
    RULES,
    Rows,
    confidence,
)

TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], dtype=torch.float64)
DRAFT = torch.tensor([[0.6, 0.2, 0.2], [0.5, 0.4, 0.1]], dtype=torch.float64)
ROWS = Rows(TARGET, DRAFT, torch.tensor([0, 2]))


@pytest.mark.parametrize(
    ("rule", "rates", "coins"),
    [
        (GREEDY, [1.0, 0.0], [1.0, 0.0]),  # likeliest tokens: 0 and 0, 1 and 0
        (REJECTION, [0.9, 0.6], [1.0, 0.1 / 0.3]),  # .5 + .2 + .2; .1 + .4 + .1
        (ONE_HOT, [0.5, 0.1], [1.0, 0.0]),  # p of the drafter's token 0
        (OWN_SAMPLE, [0.40, 0.32], [0.6, 0.1]),  # .30 + .06 + .04; .05 + .24 + .03
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rates_and_coins_are_those_worked_out_by_hand(rule, rates, coins):
    assert rule.rates(ROWS).tolist() == pytest.approx(rates, abs=1e-15)
    assert rule.coins(ROWS).tolist() == pytest.approx(coins, abs=1e-15)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rate_is_the_coin_averaged_over_the_targets_samples(rule):
    generator = torch.Generator().manual_seed(0)
    shape = (20, 5)
    target = torch.rand(shape, generator=generator, dtype=torch.float64).softmax(-1)
    draft = (3 * torch.rand(shape, generator=generator, dtype=torch.float64)).softmax(-1)
    averaged = torch.zeros(20, dtype=torch.float64)
    for token in range(5):
        rows = Rows(target, draft, torch.full((20,), token))
        averaged += target[:, token] * rule.coins(rows)
    assert (averaged - rule.rates(rows)).abs().max() < 1e-15


def test_at_temperature_0_all_rules_are_greedy_matching():
    one_hot = torch.eye(3, dtype=torch.float64)
    for draft in (one_hot, one_hot[[1, 2, 0]], one_hot[[0, 0, 2]]):
        rows = Rows(one_hot, draft, torch.arange(3))
        for rule in RULES:
            assert torch.equal(rule.rates(rows), GREEDY.rates(rows))
            assert torch.equal(rule.coins(rows), GREEDY.coins(rows))


def test_confidence_is_the_best_of_ten_made_to_add_up_to_one():
    logits = torch.log(torch.tensor([[0.4] + [0.04] * 9 + [0.12 / 6] * 6]))
    assert confidence(logits).item() == pytest.approx(0.4 / (0.4 + 9 * 0.04), abs=1e-6)
