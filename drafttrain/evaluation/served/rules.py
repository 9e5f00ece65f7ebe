"""What serving engines accept of a drafter's tokens, by the rule that each goes by.

One pass of target and drafter along an output gives the rows of both, p and q, at every position.
A rule says how likely the drafted token is accepted there (its rate), and how likely it was once
the emitted token x is known (its coin): where acceptance of x has probability a(x) in all, and x is
emitted with probability p(x), the coin is a(x) / p(x). Rates are averages over x of coins. Rounds
along the output are made of coins, because how a round goes on depends on x (see
`forced/rounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.evaluation.stops.chain_trace import kept_probability

CANDIDATES = 10
"""Tokens that llama.cpp's drafter looks at (`common/speculative.cpp`, draft-simple)."""


@dataclass(frozen=True)
class Rows:
    """Target and drafter along one output, warped as decoding is."""

    target_probs: Tensor
    """[L, V]."""
    draft_probs: Tensor
    """[L, V]."""
    tokens: Tensor
    """[L] the output."""


@dataclass(frozen=True)
class EngineRule:
    """How an engine decides about a drafted token."""

    name: str
    engines: str
    """Where it is met."""
    rates: Callable[[Rows], Tensor]
    """P(the drafted token is accepted), [L]."""
    coins: Callable[[Rows], Tensor]
    """P(the drafted token was accepted | the token that stands there), [L]."""
    p_min: bool = False
    """Whether it is one under which llama.cpp's --spec-draft-p-min looks at `confidence`."""


def equal_first_choices(rows: Rows) -> Tensor:
    """1 where the likeliest tokens of both are the same. -> [L]."""
    return (rows.target_probs.argmax(-1) == rows.draft_probs.argmax(-1)).double()


def overlap(rows: Rows) -> Tensor:
    """Sum of min(p, q): the acceptance of rejection sampling (Leviathan et al. 2023). -> [L]."""
    return torch.minimum(rows.target_probs, rows.draft_probs).double().sum(-1)


def kept(rows: Rows) -> Tensor:
    """min(1, q(x) / p(x)) at the emitted tokens. -> [L]."""
    return kept_probability(rows.draft_probs, rows.target_probs, rows.tokens).double()


def at_first_choice(rows: Rows) -> Tensor:
    """p(argmax q): a one-hot draft, matched with a sample of the target. -> [L]."""
    best = rows.draft_probs.argmax(-1, keepdim=True)
    return rows.target_probs.gather(-1, best)[:, 0].double()


def is_first_choice(rows: Rows) -> Tensor:
    """1 where the emitted token is the drafter's likeliest. -> [L]."""
    return (rows.draft_probs.argmax(-1) == rows.tokens).double()


def collision(rows: Rows) -> Tensor:
    """Sum of p q: independent samples of both that are equal. -> [L]."""
    return (rows.target_probs * rows.draft_probs).double().sum(-1)


def drawn_again(rows: Rows) -> Tensor:
    """q(x) at the emitted tokens. -> [L]."""
    return rows.draft_probs.gather(-1, rows.tokens[:, None])[:, 0].double()


GREEDY = EngineRule(
    "greedy",
    "every engine at temperature 0",
    equal_first_choices,
    equal_first_choices,
    p_min=True,
)
"""Both take their likeliest token. Above temperature 0: along a text that was sampled."""
REJECTION = EngineRule(
    "rejection",
    "Transformers; vLLM, draft_sample_method probabilistic; llama.cpp, --spec-draft-sampling "
    f"probabilistic (its drafter draws from {CANDIDATES} tokens)",
    overlap,
    kept,
)
"""The drafted token is a sample, and rejection sampling decides."""
ONE_HOT = EngineRule(
    "one-hot", "vLLM and llama.cpp by default", at_first_choice, is_first_choice, p_min=True
)
"""The drafter's likeliest token against a sample of the target."""
OWN_SAMPLE = EngineRule("own-sample", "MLX-LM", collision, drawn_again)
"""A sample of the drafter against a sample of the target."""

RULES = (GREEDY, REJECTION, ONE_HOT, OWN_SAMPLE)


def rules_for(greedy: bool) -> tuple[EngineRule, ...]:
    """The rules that differ: at temperature 0 all of them are greedy matching."""
    return (GREEDY,) if greedy else RULES


def served_by_default(greedy: bool) -> EngineRule:
    """What vLLM and llama.cpp do where nothing is asked for."""
    return GREEDY if greedy else ONE_HOT


def confidence(draft_logits: Tensor) -> Tensor:
    """What llama.cpp's --spec-draft-p-min looks at: the best of the ten likeliest tokens, their
    probabilities made to add up to 1, at temperature 1. Shapes: [L, V] -> [L]."""
    best = draft_logits.double().topk(min(CANDIDATES, draft_logits.shape[-1]), dim=-1).values
    return best.softmax(-1)[:, 0]
