"""Stop policies: how far to draft in a round, without seeing the token that is decided on.

Rejection sampling stays exact if and only if the decision to submit a token depends on the prefix,
on earlier tokens of the draft and on independent randomness, but never on that token's own value.
`DraftState` holds nothing else, so every policy here is exact. In greedy decoding a draft is a
point mass, and truncating it is always exact. Each policy is a function with a row in
`config/methods.py`; it returns whether to draft one more token.
"""

import math
from functools import partial
from pkgutil import resolve_name

import torch
from torch import Tensor

from drafttrain.config.methods import STOPS
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.types import DraftState, NotFinite
from drafttrain.models.acceptance_head import AcceptanceHead, quick_judge


def make_policy(name: str, value: float, max_draft: int) -> StopPolicy:
    """Returns the policy of this name, without an acceptance head, with its threshold."""
    return StopPolicy(STOPS[name], resolve_name(STOPS[name].function), value, max_draft)


Entropy = partial(make_policy, "entropy")
Confidence = partial(make_policy, "confidence")
Cumulative = partial(make_policy, "cumulative")
Gain = partial(make_policy, "gain")


def FixedLength(k: int) -> StopPolicy:
    """Returns the policy that always drafts k tokens, or k levels of a tree."""
    return StopPolicy(STOPS["fixed"], always, k, k)


def HeadPolicy(head: AcceptanceHead, h: float, max_draft: int) -> StopPolicy:
    """Returns the policy that stops if an acceptance head predicts a rejection (`HeadJudge`)."""
    return StopPolicy(STOPS["head"], HeadJudge(head), h, max_draft, head.config.state)


def always(state: DraftState, k: float) -> bool:
    """Continues to the maximal draft length."""
    return True


def certain(state: DraftState, nats: float) -> bool:
    """Continues until the entropy of the newest known row exceeds `nats`, before temperature, top-k
    and top-p."""
    return not state.logits or entropy(state.logits[-1]) <= nats


def confident(state: DraftState, least: float) -> bool:
    """Continues until a token's probability, in greedy decoding the largest of its row, is below
    `least`: Transformers' assistant_confidence_threshold. Reads the newest known row."""
    return not state.logits or largest_probability(state.logits[-1]) >= least


def likely_so_far(state: DraftState, least: float) -> bool:
    """Continues until the product of the rows' largest probabilities is below `least`.

    The probabilities are taken before temperature. In greedy drafting the product is the
    probability of the whole draft, the cumulative confidence of serving engines.
    """
    largest = state.notes.setdefault("largest", [])
    largest.extend(largest_probability(row) for row in state.logits[len(largest) :])
    return math.prod(largest) >= least


def gaining(state: DraftState, delta: float) -> bool:
    """Continues while the last level of a tree added more than delta expected accepted tokens.

    OPT-Tree (Wang et al. 2025), Algorithm 1. delta lies between the cost of a level,
    t_draft / t_target, and 1; delta = 0 continues to the maximal depth. The tree contains no
    sampled tokens, so the decision cannot bias the output.
    """
    if not state.expected:
        return True
    before = state.expected[-2] if len(state.expected) > 1 else 0.0
    return state.expected[-1] - before > delta


class HeadJudge:
    """Continues until a rejection is likely: stops if 1 - prod_j P_j > h.

    SpecDec++ (Huang et al. 2024), Algorithm 2; P_j is the acceptance probability that the head
    predicts from the j-th known state (`DraftState`). Continues if there is no state yet. Raises
    NotFinite if the head gives NaN.
    """

    def __init__(self, head: AcceptanceHead) -> None:
        self.head = head.requires_grad_(False).eval()
        self.judge = quick_judge(head)

    def __call__(self, state: DraftState, h: float) -> bool:
        scores = state.notes.setdefault("acceptance", [])
        scores.extend(self.judge(hidden) for hidden in state.hidden[len(scores) :])
        acceptance = math.prod(scores)
        if math.isnan(acceptance):
            raise NotFinite(
                f"the acceptance head {self.head.name_or_path!r} gives NaN; load the drafter in "
                "float32 or bfloat16, or train the head again"
            )
        return 1.0 - acceptance <= h


def entropy(logits: Tensor) -> float:
    """Returns the entropy of a row's softmax in nats; tokens at -inf contribute 0. Shapes: [V]."""
    return torch.special.entr(logits.softmax(dim=-1)).sum().item()


def largest_probability(logits: Tensor) -> float:
    """Returns the largest probability of a row's softmax. Shapes: [V]."""
    return logits.softmax(dim=-1).max().item()  # logsumexp is slow on tokens that are never drafted
