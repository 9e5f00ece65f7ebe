"""Verification rules: which drafted tokens are accepted, and the one more token that follows.

Each is a function that `config/methods.py` has a row for. All work on logits that have been
through the target's own processors. Row 0 judges the first drafted token, row i + 1 the token after
token i (algorithms: Section 1 of each paper below).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Protocol

import torch
from torch import Tensor

from drafttrain.config.decode import VerifierConfig
from drafttrain.config.kinds import KINDS, DrawKind, Evidence, in_words
from drafttrain.config.methods import RULES, TREES, StopKind, VerifierRule, rules_for
from drafttrain.decoding.batching import BatchedCall, BatchedSteps, judge_each
from drafttrain.decoding.roles import Randomness, Verifier
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import NotFinite, Proposal, Sampling, Verdict

SEEN: dict[Evidence, str] = {
    "logits": "the drafter's distributions",
    "hidden": "the states of draft tokens",
    "expected": "the expected acceptance of a tree's levels",
}


class Drafts(Protocol):
    """What a pairing goes by of a drafter."""

    name: str
    provides: frozenset[Evidence]
    drafts_trees: bool

    def draw_kind(self, sampling: Sampling) -> DrawKind: ...


def make_verifier(name: str, *values: float) -> Verifier:
    """The rule of this name; values are those of its settings, in the table's order.

    Raises ValueError for values that are out of range.
    """
    rule = RULES[name]
    config = VerifierConfig(kind=name, **dict(zip(rule.settings, values, strict=True)))
    settings = {name: getattr(config, name) for name in rule.settings}
    return Verifier(rule, resolve_name(rule.function), settings)


GreedyMatch = partial(make_verifier, "greedy")
SpecVerification = partial(make_verifier, "spec-verification")
RejectionSampling = partial(make_verifier, "rejection")
BlockVerification = partial(make_verifier, "block")


def check_pairing(
    drafter: Drafts, stop: StopKind, verifier: VerifierRule, sampling: Sampling
) -> None:
    """Refuse parts of a method that do not go together, by their rows in the tables of `config`.

    A stop policy must go by what the drafter shows, and may not bias sampling; a verifier must be
    valid for the sampling, and for how the drafter draws. Raises ValueError, before any model runs.
    """
    if stop.greedy_only and not sampling.greedy:
        raise ValueError(
            f"stop policy {stop.name!r} needs greedy decoding, but temperature is "
            f"{sampling.temperature}: if a sampled token were dropped for its own value, the "
            "output's distribution would change; use the entropy or head policy, or temperature 0"
        )
    unseen = stop.requires - drafter.provides
    if unseen:
        seen = min(unseen)
        trees = [tree.name for tree in TREES.values() if seen in tree.provides]
        kinds = in_words([kind for kind in KINDS.values() if seen in kind.provides])
        raise ValueError(
            f"stop policy {stop.name!r} goes by {SEEN[seen]}, which {drafter.name!r} does not "
            f"show; use a fixed length, or {' or '.join(trees) or f'chains of {kinds}'}"
        )
    if verifier.greedy_only and not sampling.greedy:
        raise ValueError(
            f"verifier {verifier.name!r} decodes greedily, but temperature is "
            f"{sampling.temperature}; set temperature to 0, or use verifier.kind=rejection"
        )
    drawn = drafter.draw_kind(sampling)
    if drawn not in verifier.accepts_draws or (drafter.drafts_trees and not verifier.takes_trees):
        raise ValueError(
            f"verifier {verifier.name!r} is not valid for {drawn} "
            f"{'trees' if drafter.drafts_trees else 'chains'}, which {drafter.name!r} drafts; use "
            f"{' or '.join(rules_for(drawn, drafter.drafts_trees))}"
        )


def verify_greedy(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
) -> BatchedSteps[Verdict]:
    """Accept a token that is the target's arg-max; else put the arg-max in its place.

    Lossless for greedy decoding (blockwise decoding, Stern et al. 2018, Section 3). On a tree: go
    down while a child is the arg-max. Shapes: target_logits [N + 1, V].
    """
    best, drafted = yield BatchedCall(judge_each, (target_logits, proposal.tokens))
    pairs = zip(proposal.parents.tolist(), drafted, strict=True)
    child = {pair: node for node, pair in enumerate(pairs)}
    path: list[int] = []
    node = child.get((-1, best[0]))
    while node is not None:
        path.append(node)
        node = child.get((node, best[node + 1]))
    return _verdict(path, best, drafted)


def verify_spec(
    proposal: Proposal,
    target_logits: Tensor,
    sampling: Sampling,
    randomness: Randomness,
    beta: int,
    tau: float,
) -> BatchedSteps[Verdict]:
    """Accept a token among the target's top beta within tau of the first; lossy.

    SpecDec (Xia et al. 2023), Equations 8-10: rank <= beta and top-1 log-probability minus the
    token's <= tau, where logits serve since the normaliser cancels. A gap equal to tau passes,
    and so does a token that ties the beta-th. The first failure is replaced by the arg-max. On a
    tree: go down to the child that the target prefers among those accepted.
    Shapes: target_logits [N + 1, V].
    """
    best, drafted = yield BatchedCall(judge_each, (target_logits, proposal.tokens))
    parents = proposal.parents.to(target_logits.device)
    tokens = proposal.tokens.to(target_logits.device)
    rows = target_logits[parents + 1]
    top = rows.topk(min(beta, rows.shape[-1]), dim=-1).values
    at_token = rows.gather(-1, tokens[:, None])[:, 0]
    accepted = (at_token >= top[:, -1]) & (top[:, 0] - at_token <= tau)
    preferred: dict[int, int] = {}
    scores = at_token.tolist()
    above = proposal.parents.tolist()
    for node in itertools.compress(range(len(above)), accepted.tolist()):
        rival = preferred.setdefault(above[node], node)
        if scores[node] > scores[rival]:
            preferred[above[node]] = node
    path: list[int] = []
    node = preferred.get(-1)
    while node is not None:
        path.append(node)
        node = preferred.get(node)
    return _verdict(path, best, drafted)


def verify_rejection(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
) -> Verdict:
    """Accept with probability min(1, target / draft); else sample the residual. Lossless.

    Leviathan et al. 2023, Algorithm 1; Chen et al. 2023. A rejected token is replaced by a sample
    of Norm[(target - draft)+]; when all are accepted, one more is sampled from target. A residual
    that is zero everywhere in floating point falls back to target. A proposal without
    probabilities is a point mass on its tokens. Shapes: target_logits [N + 1, V].
    """
    target_probs = warp(target_logits, sampling)
    drafted = len(proposal.tokens)
    accepted = 0
    if drafted > 0:
        tokens = proposal.tokens.to(target_probs.device)
        draft_probs = draft_rows(proposal, tokens, target_probs)
        accepted = randomness.accept_run(
            acceptance_probability(target_probs[:-1], draft_probs, tokens)
        )
    next_probs = target_probs[accepted]
    if accepted < drafted:
        next_probs = residual(next_probs, draft_probs[accepted])
    next_token = int(randomness.categorical(next_probs[None]))
    return Verdict(torch.arange(accepted), next_token)


def verify_block(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
) -> Verdict:
    """Accept the longest prefix whose own coin says yes: later tokens save earlier ones. Lossless.

    Block verification (Sun et al. 2024, Algorithm 2), for chains. Each prefix has a coin of its own
    (`block_rejection`), and the longest of those accepted counts, where token-by-token rejection
    ends at the first coin that says no: a prefix is accepted with w_i, which is never less than
    prod_j min(1, target_j / draft_j). What follows is a sample of Norm[(w_i target - draft)+], of
    target where all are accepted. Exact for drafts that end early too, wherever that depends on the
    tokens up to there: there the coin is w_i. Shapes: target_logits [N + 1, V].

    How many tokens are emitted depends on those behind them, so that they follow target's rows only
    in law of the whole output.
    A draft ends in front of a row that is not finite.
    """
    target_probs = warp(target_logits, sampling)
    drafted = usable_rows(target_probs)
    target_probs = target_probs[: drafted + 1]
    if drafted == 0:
        return Verdict(torch.arange(0), int(randomness.categorical(target_probs)[0]))
    tokens = proposal.tokens[:drafted].to(target_probs.device)
    draft_probs = draft_rows(proposal, proposal.tokens.to(target_probs.device), target_probs)
    draft_probs = draft_probs[:drafted]
    weights = prefix_weights(target_probs[:-1], draft_probs, tokens)
    rejection = block_rejection(weights, target_probs, draft_probs)
    accepted = drafted - randomness.accept_run(rejection.flip(0))  # the longest is asked first
    next_probs = target_probs[accepted]
    if accepted < drafted:
        next_probs = residual(next_probs, draft_probs[accepted], weights[accepted])
    next_token = int(randomness.categorical(next_probs[None]))
    return Verdict(torch.arange(accepted), next_token)


def usable_rows(target_probs: Tensor) -> int:
    """Draft tokens of a chain whose rows are finite: the first row that is not judges none.

    Shapes: target_probs [N + 1, V] -> 0..N.
    """
    finite = target_probs.sum(-1).isfinite().tolist()
    return min([*finite, False].index(False), len(finite) - 1)


def prefix_weights(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> list[float]:
    """Probability that a prefix of 0, 1, ..., N tokens is accepted by block verification.

    w_0 = 1, w_i = min(1, w_{i-1} target / draft) at token i (Sun et al. 2024, Equation 4).
    Shapes: target_probs, draft_probs [N, V], tokens [N] -> N + 1 numbers.
    """
    weights = [1.0]
    for ratio in probability_ratio(target_probs, draft_probs, tokens).tolist():
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def block_rejection(weights: Sequence[float], target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Probability that the coin of a prefix of 1, ..., N tokens says no.

    1 - h_i with h_N = w_N, h_i = r_i / (r_i + 1 - w_i) and r_i = sum (w_i target - draft)+ over the
    rows of token i + 1; 0 / 0 counts as h_i = 1 (Sun et al. 2024, Algorithm 2).
    Shapes: weights N + 1, target_probs [N + 1, V], draft_probs [N, V] -> [N].
    """
    weight = target_probs.new_tensor(weights[1:])
    missing = target_probs.new_tensor([1.0 - one for one in weights[1:]])
    shared = weight[:-1, None] * target_probs[1:-1] - draft_probs[1:]
    left = shared.clamp_min(0.0).sum(dim=-1)
    total = left + missing[:-1]
    inside = torch.where(total > 0.0, missing[:-1] / total, 0.0)
    return torch.cat((inside, missing[-1:]))


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """Probability that each drafted token is accepted: min(1, target / draft) at the token.

    Leviathan et al. 2023, Algorithm 1. Shapes: target_probs, draft_probs [N, V], tokens [N] -> [N].
    """
    return probability_ratio(target_probs, draft_probs, tokens).clamp_max(1.0)


def probability_ratio(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """target / draft at each drafted token, 0 where target excludes it, or either is NaN.

    Shapes: target_probs, draft_probs [N, V], tokens [N] -> [N].
    """
    at_target = target_probs.gather(-1, tokens[:, None])[:, 0]
    at_draft = draft_probs.gather(-1, tokens[:, None])[:, 0]
    smallest = torch.finfo(at_draft.dtype).tiny  # a token that target excludes is never accepted
    return (at_target / at_draft.clamp_min(smallest)).nan_to_num(0.0, posinf=torch.inf)


def residual(target_probs: Tensor, draft_probs: Tensor, weight: float = 1.0) -> Tensor:
    """Norm[(weight target - draft)+], or target where that is zero everywhere.

    Shapes: [V], [V] -> [V].
    """
    excess = (weight * target_probs - draft_probs).clamp_min(0.0)
    total = excess.sum()
    return torch.where(total > 0.0, excess / total, target_probs)


def draft_rows(proposal: Proposal, tokens: Tensor, target_probs: Tensor) -> Tensor:
    """The distribution each token was drawn from. Shapes: tokens [N] -> [N, V]."""
    if proposal.draft_probs is None:
        points = target_probs.new_zeros(len(tokens), target_probs.shape[-1])
        return points.scatter_(-1, tokens[:, None], 1.0)
    rows = proposal.draft_probs.to(target_probs)
    return rows if proposal.rows is None else rows[proposal.rows.to(rows.device)]


def _verdict(path: list[int], best: list[int], drafted: list[int]) -> Verdict:
    """A path, then the arg-max of the row after it. Raises NotFinite where that has none."""
    row = path[-1] + 1 if path else 0
    if best[row] < 0:
        raise NotFinite(
            f"the target's logits are not finite in row {row} of the draft's {len(best)}: a model "
            "gave NaN or infinity, or a logits processor left no token; load it in float32 or "
            "bfloat16"
        )
    return Verdict(torch.tensor(path, dtype=torch.long), best[row], drafted=drafted)
