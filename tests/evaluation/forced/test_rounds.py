"""Expected rounds along outputs are those that an engine plays, every outcome enumerated."""

from itertools import product

import numpy as np
import pytest
import torch

from drafttrain.evaluation.forced.rounds import expect_rounds
from drafttrain.evaluation.served.rules import ONE_HOT, OWN_SAMPLE, REJECTION, Rows

LENGTH = 5
START = 0
GENERATOR = torch.Generator().manual_seed(4)
TARGET, DRAFT = (
    (2 * torch.randn((3, 3), generator=GENERATOR, dtype=torch.float64)).softmax(-1)
    for _ in range(2)
)
"""Rows by the token before: p and q of two models that look one token back."""


class Engine:
    """Plays every outcome of serving by the book, and counts as vLLM does."""

    def __init__(self, rule, k, p_min=0.0):
        self.rule, self.k, self.p_min = rule, k, p_min
        self.steps = self.drafts = self.drafted = 0.0
        self.accepted = np.zeros(k)
        for token in range(3):  # the prompt's own pass
            self.step([token], TARGET[START, token].item())

    def step(self, tokens, share):
        if len(tokens) == LENGTH or share == 0.0:
            return
        self.steps += share
        most = min(self.k, LENGTH - 1 - len(tokens))
        if self.stops(tokens):
            most = 0
        if most:
            self.drafts += share
            self.drafted += share * most
        self.verify(tokens, share, 0, most)

    def stops(self, tokens):
        return DRAFT[tokens[-1]].max().item() < self.p_min

    def verify(self, tokens, share, depth, most):
        p, q = TARGET[tokens[-1]].tolist(), DRAFT[tokens[-1]].tolist()
        if depth == most or (depth and self.stops(tokens)):
            for token in range(3):
                self.step([*tokens, token], share * p[token])
            return
        for token in range(3):
            taken = share * self.both(p, q, token)
            self.accepted[depth] += taken
            if taken:
                self.verify([*tokens, token], taken, depth + 1, most)
        for token, left in enumerate(self.instead(p, q)):
            self.step([*tokens, token], share * left)

    def both(self, p, q, token):
        """P(token is drafted and accepted)."""
        if self.rule is REJECTION:
            return q[token] * min(1.0, p[token] / q[token])
        if self.rule is ONE_HOT:
            return p[token] if token == q.index(max(q)) else 0.0
        return p[token] * q[token]

    def instead(self, p, q):
        """P(the draft is refused and this token is emitted)."""
        if self.rule is REJECTION:
            left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            refused = 1.0 - sum(self.both(p, q, token) for token in range(3))
            return [refused * one / sum(left) for one in left]
        if self.rule is ONE_HOT:
            return [0.0 if t == q.index(max(q)) else p[t] for t in range(3)]
        return [p[t] * (1.0 - q[t]) for t in range(3)]


def along_every_output(rule, k, p_min):
    steps = drafts = drafted = 0.0
    accepted = np.zeros(k)
    limit = LENGTH - 1 - np.arange(LENGTH)
    for output in product(range(3), repeat=LENGTH):
        before = [START, *output[:-1]]
        rows = Rows(TARGET[before], DRAFT[before], torch.tensor(output))
        share = rows.target_probs.gather(-1, rows.tokens[:, None]).prod().item()
        sure = DRAFT[before].max(-1).values.numpy()
        found = expect_rounds(rule.coins(rows).numpy(), limit, k, sure, p_min)
        steps, drafts = steps + share * found.num_steps, drafts + share * found.num_drafts
        drafted += share * (found.num_draft_tokens or 0.0)
        accepted += share * found.num_accepted_tokens_per_pos
    return steps, drafts, drafted, accepted


@pytest.mark.parametrize("p_min", [0.0, 0.7])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", [REJECTION, ONE_HOT, OWN_SAMPLE], ids=lambda rule: rule.name)
def test_expected_rounds_are_those_of_serving(rule, k, p_min):
    engine = Engine(rule, k, p_min)
    steps, drafts, drafted, accepted = along_every_output(rule, k, p_min)
    assert steps == pytest.approx(engine.steps, abs=1e-12)
    assert drafts == pytest.approx(engine.drafts, abs=1e-12)
    assert accepted == pytest.approx(engine.accepted, abs=1e-12)
    if p_min == 0.0:
        assert drafted == pytest.approx(engine.drafted, abs=1e-12)
    else:
        assert drafts < steps - 0.05  # some drafts were empty


def test_rounds_by_hand():
    coins, limit = np.array([0.0, 1.0, 0.5, 1.0, 0.0]), np.array([9, 9, 9, 9, 9])
    found = expect_rounds(coins, limit, k=2)
    # from 1: one token surely, the second by half; then from 3 (1 of 1, then none) or from 4
    assert found.num_steps == found.num_drafts == 1 + 0.5 + 0.5
    assert found.num_accepted_tokens_per_pos.tolist() == [1 + 0.5, 0.5]
    assert found.num_draft_tokens == 2 * found.num_drafts


def test_behind_a_doubtful_token_nothing_is_drafted_and_an_empty_draft_is_no_draft():
    coins, limit, sure = np.ones(5), np.full(5, 9), np.array([1.0, 0.9, 0.2, 0.2, 0.9])
    found = expect_rounds(coins, limit, 3, sure, p_min=0.5)
    # from 1: one token, the target gives 2; from 3: none, the target gives 3; from 4: one
    assert (found.num_steps, found.num_drafts) == (3.0, 2.0)
    assert found.num_accepted_tokens_per_pos.tolist() == [2.0, 0.0, 0.0]
    assert found.num_draft_tokens is None


def test_an_answer_of_one_token_is_not_drafted():
    assert expect_rounds(np.ones(1), np.array([4]), 2).num_steps == 0.0
