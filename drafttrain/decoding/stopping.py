"""Stop policies: how far to draft in a round. None of them sees the token it decides about.

Rejection sampling stays exact if and only if whether a token is submitted depends on the prefix,
on earlier tokens of the draft and on independent randomness, never on that token's own value.
`DraftState` holds nothing else, so every policy here is exact; in greedy decoding a draft is a
point mass, and any truncation of it is. Each is a function that `config/methods.py` has a row for.
"""

from __future__ import annotations

import math
from functools import partial
from pkgutil import resolve_name

import torch
from torch import Tensor

from drafttrain.config.kinds import StateKind
from drafttrain.config.methods import STOPS
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.types import DraftState, NotFinite
from drafttrain.models.acceptance_head import AcceptanceHead, quick_judge


def make_policy(name: str, value: float, max_draft: int) -> StopPolicy:
    """The policy of this name that goes by a value; of those without an acceptance head."""
    return StopPolicy(STOPS[name], resolve_name(STOPS[name].function), value, max_draft)


Entropy = partial(make_policy, "entropy")
Confidence = partial(make_policy, "confidence")
Cumulative = partial(make_policy, "cumulative")
Gain = partial(make_policy, "gain")


def FixedLength(k: int, state_kind: StateKind | None = None) -> StopPolicy:
    """Always k tokens, or levels of a tree.

    state_kind: nothing decides here, but states of this kind are shown, and logged, all the same.
    """
    return StopPolicy(STOPS["fixed"], always, k, k, state_kind)


def HeadPolicy(head: AcceptanceHead, h: float, max_draft: int) -> StopPolicy:
    """Stop when an acceptance head thinks a rejection likelier than h (`HeadJudge`)."""
    return StopPolicy(STOPS["head"], HeadJudge(head), h, max_draft, head.config.state)


def always(state: DraftState, k: float) -> bool:
    """Go on to the most tokens of a round."""
    return True


def certain(state: DraftState, nats: float) -> bool:
    """Go on until a row of more nats of entropy, before temperature, top-k and top-p.

    It looks at the newest row that is known: with a drafter of one token a call that of the last
    drafted token, with a block drafter that of the token to be drafted.
    """
    return not state.logits or entropy(state.logits[-1]) <= nats


def confident(state: DraftState, least: float) -> bool:
    """Go on until a token of less probability; greedy decoding only.

    As Transformers' assistant_confidence_threshold. In greedy decoding the token's probability is
    the largest of its row, of the newest row that is known.
    """
    return not state.logits or largest_probability(state.logits[-1]) >= least


def likely_so_far(state: DraftState, least: float) -> bool:
    """Go on until the rows' largest probabilities, before temperature, multiply to less.

    In greedy drafting that is the probability of the whole draft, the cumulative confidence of
    serving engines. Rows of blocks count up to the token to be drafted; otherwise up to the last.
    """
    known = state.notes.setdefault("largest", [])
    known.extend(largest_probability(row) for row in state.logits[len(known) :])
    return math.prod(known) >= least


def gaining(state: DraftState, delta: float) -> bool:
    """Go on until a level of a tree adds no more than delta expected accepted tokens.

    OPT-Tree (Wang et al. 2025), Algorithm 1: delta lies between t_draft / t_target, what a level
    costs, and 1; 0 goes on to the greatest depth. The tree holds no drawn tokens, so nothing it
    depends on can bias the output.
    """
    if not state.expected:
        return True
    before = state.expected[-2] if len(state.expected) > 1 else 0.0
    return state.expected[-1] - before > delta


class HeadJudge:
    """Go on until some drafted token was probably rejected: 1 - prod_j P_j > h.

    SpecDec++ (Huang et al. 2024), Algorithm 2; P_j is the acceptance head's probability at the
    j-th state. With a drafter of one token a call and states of tokens at their own positions, the
    last drafted token has no state yet and is submitted unscored; states of tokens as they were
    drawn have no such lag. With a block drafter all slots are judged in one call and the product
    runs up to the one asked about, so that a block ends before verification. Without any state it
    goes on.
    """

    def __init__(self, head: AcceptanceHead) -> None:
        self.head = head.requires_grad_(False).eval()
        self.judge = quick_judge(head)

    def __call__(self, state: DraftState, h: float) -> bool:
        return not state.hidden or self.rejection(state) <= h

    def rejection(self, state: DraftState) -> float:
        """Predicted probability that at least one token, up to the one asked about, is rejected."""
        judged = state.notes.setdefault("acceptance", [])
        new = state.hidden[len(judged) :]
        if len(new) == 1:
            judged.append(self.judge(new[0]))
        elif new:
            judged.extend(self.head.acceptance(torch.stack(tuple(new))).tolist())
        acceptance = math.prod(judged[: state.depth + 1])
        if math.isnan(acceptance):
            raise NotFinite(
                f"the acceptance head {self.head.name_or_path!r} gives NaN; load the drafter in "
                "float32 or bfloat16, or train the head again"
            )
        return 1.0 - acceptance


def entropy(logits: Tensor) -> float:
    """Of the softmax of a row, in nats; excluded tokens count nothing. Shapes: [V]."""
    return torch.special.entr(logits.softmax(dim=-1)).sum().item()


def largest_probability(logits: Tensor) -> float:
    """Of the softmax of a row. Shapes: [V]."""
    return logits.softmax(dim=-1).max().item()  # logsumexp takes long over tokens never drafted
