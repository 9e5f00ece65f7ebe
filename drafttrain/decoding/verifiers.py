"""Verification rules for chains: which draft tokens are accepted, and the bonus token after them.

Each rule is a function with a row in `config/methods.py`. The target's logits processors have been
applied to the logits. Row 0 verifies the first draft token, row i + 1 the token after token i.
"""

from collections.abc import Sequence
from functools import partial
from pkgutil import resolve_name

import torch
from torch import Tensor

from drafttrain.config.decode import VerifierConfig
from drafttrain.config.kinds import KINDS, Evidence, in_words
from drafttrain.config.methods import RULES, STOPS, TREES, StopKind, VerifierRule, rules_for
from drafttrain.decoding.batching import BatchedCall, BatchedSteps, arg_max_and_tokens
from drafttrain.decoding.roles import Drafter, Randomness, Verifier
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import NotFinite, Proposal, Sampling, Verdict

EVIDENCE: dict[Evidence, str] = {
    "logits": "the drafter's distribution",
    "hidden": "the hidden state of draft tokens",
    "expected": "the expected acceptance of a tree's levels",
}


def make_verifier(name: str, *values: float) -> Verifier:
    """Returns the rule of this name; values: its settings in the order of its row.

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
    drafter: Drafter, stop: StopKind, verifier: VerifierRule, sampling: Sampling
) -> None:
    """Checks that drafter, stop policy, verifier and sampling fit, by their rows in `config`.

    The drafter must provide what the stop policy reads, and the policy may not bias sampling; the
    verifier must be valid for the sampling and for how the drafter draws. Raises ValueError. Reads
    only the drafter's name, `provides`, `drafts_trees` and `draw_kind`.
    """
    if stop.greedy_only and not sampling.greedy:
        raise ValueError(
            f"stop policy {stop.name!r} needs greedy decoding, but temperature is "
            f"{sampling.temperature}: dropping a sampled token because of its own value changes "
            "the output distribution; use the entropy or head policy, or temperature 0"
        )
    missing = stop.requires - drafter.provides
    if missing:
        evidence = min(missing)
        trees = [tree.name for tree in TREES.values() if evidence in tree.provides]
        kinds = in_words([kind for kind in KINDS.values() if evidence in kind.provides])
        others = [
            other.name
            for other in STOPS.values()
            if other.requires <= drafter.provides and (sampling.greedy or not other.greedy_only)
        ]
        raise ValueError(
            f"stop policy {stop.name!r} reads {EVIDENCE[evidence]}, but {drafter.name!r} does not "
            f"provide it; use stop.kind={' or '.join(others)}, or "
            f"{' or '.join(trees) or f'chains of {kinds}'}"
        )
    if verifier.greedy_only and not sampling.greedy:
        raise ValueError(
            f"verifier {verifier.name!r} needs greedy decoding, but temperature is "
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
    """Accepts tokens while they are the target's arg-max; the bonus token is the next arg-max.

    Lossless for greedy decoding (blockwise decoding, Stern et al. 2018, Section 3). In a tree, it
    descends while a child is the arg-max. Shapes: target_logits [N + 1, V].
    """
    best, drafted = yield BatchedCall(arg_max_and_tokens, (target_logits, proposal.tokens))
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
    """Accepts tokens among the target's top beta and within tau of the best one; lossy.

    SpecDec (Xia et al. 2023), Equations 8-10: rank <= beta, and top-1 log-probability minus the
    token's <= tau. Logits are compared instead, since the normaliser cancels. A gap equal to tau
    and a tie with the beta-th token are accepted. The first rejected token is replaced by the
    arg-max. For chains. Shapes: target_logits [N + 1, V].
    """
    best, drafted = yield BatchedCall(arg_max_and_tokens, (target_logits, proposal.tokens))
    rows, tokens = target_logits[:-1], proposal.tokens.to(target_logits.device)
    top = rows.topk(min(beta, rows.shape[-1]), dim=-1).values
    at_token = rows.gather(-1, tokens[:, None])[:, 0]
    accepted = (at_token >= top[:, -1]) & (top[:, 0] - at_token <= tau)
    return _verdict([*range(int(accepted.cumprod(0).sum()))], best, drafted)


def verify_rejection(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
) -> Verdict:
    """Accepts tokens with probability min(1, target / draft), else samples the residual. Lossless.

    Leviathan et al. 2023, Algorithm 1; Chen et al. 2023. The first rejected token is replaced by a
    sample from Norm[(target - draft)+]; if all tokens are accepted, the bonus token is sampled from
    target. A proposal without draft_probs is a point mass on each token.
    Shapes: target_logits [N + 1, V].
    """
    target_probs = warp(target_logits, sampling)
    tokens, draft_probs = proposal.tokens.to(target_probs.device), target_probs[:0]
    accepted = 0
    if len(tokens) > 0:
        draft_probs = draft_rows(proposal, target_probs)
        probs = acceptance_probability(target_probs[:-1], draft_probs, tokens)
        accepted = randomness.accept_run(probs)
    return _with_next(accepted, target_probs, draft_probs, randomness)


def verify_block(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, randomness: Randomness
) -> Verdict:
    """Accepts the longest prefix that passes its own random test. Lossless, for chains.

    Block verification (Sun et al. 2024, Algorithm 2). Every prefix is tested independently
    (`block_rejection`), and the longest accepted one counts, so a later token can save an earlier
    one; token-by-token rejection ends at the first failure. A prefix of i tokens is accepted with
    probability w_i, at least prod_j min(1, target_j / draft_j). The bonus token is sampled from
    Norm[(w_i target - draft)+], or from target if all tokens are accepted. It is exact also if a
    stop policy ends the draft early depending on its tokens so far: the last prefix is then tested
    with probability w_i. Shapes: target_logits [N + 1, V].

    The number of emitted tokens depends on later draft tokens, so only the whole output follows the
    target's distribution, not each token given how many were emitted. The draft is cut before the
    first row that is not finite.
    """
    target_probs = warp(target_logits, sampling)
    finite = target_probs.sum(-1).isfinite().tolist()
    drafted = min([*finite, False].index(False), len(proposal.tokens))
    if drafted == 0:
        return _with_next(0, target_probs, target_probs[:0], randomness)
    target_probs = target_probs[: drafted + 1]
    tokens = proposal.tokens[:drafted].to(target_probs.device)
    draft_probs = draft_rows(proposal, target_probs)[:drafted]
    weights = prefix_weights(target_probs[:-1], draft_probs, tokens)
    rejection = block_rejection(weights, target_probs, draft_probs)
    accepted = drafted - randomness.accept_run(rejection.flip(0))  # tests the longest prefix first
    return _with_next(accepted, target_probs, draft_probs, randomness, weights[accepted])


def _with_next(
    accepted: int,
    target_probs: Tensor,
    draft_probs: Tensor,
    randomness: Randomness,
    weight: float = 1.0,
) -> Verdict:
    """Returns the first `accepted` tokens of a chain with a sampled next token: from the residual
    (`residual`) after a rejection, from target if all tokens are accepted.

    Shapes: target_probs [N + 1, V], draft_probs [N, V].
    """
    next_probs = target_probs[accepted]
    if accepted < len(draft_probs):
        next_probs = residual(next_probs, draft_probs[accepted], weight)
    return Verdict(torch.arange(accepted), int(randomness.categorical(next_probs[None])))


def prefix_weights(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> list[float]:
    """Returns the probabilities that block verification accepts the first 0, 1, ..., N tokens.

    w_0 = 1, w_i = min(1, w_{i-1} target / draft) at token i (Sun et al. 2024, Equation 4).
    Shapes: target_probs, draft_probs [N, V], tokens [N] -> N + 1 numbers.
    """
    weights = [1.0]
    for ratio in probability_ratio(target_probs, draft_probs, tokens).tolist():
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def block_rejection(weights: Sequence[float], target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Returns the probabilities that the prefixes of 1, ..., N tokens fail their own tests.

    1 - h_i with h_N = w_N, h_i = r_i / (r_i + 1 - w_i) and r_i = sum (w_i target - draft)+ over the
    rows of token i + 1; 0 / 0 counts as h_i = 1 (Sun et al. 2024, Algorithm 2).
    Shapes: weights N + 1, target_probs [N + 1, V], draft_probs [N, V] -> [N].
    """
    weight = target_probs.new_tensor(weights[1:])
    complement = target_probs.new_tensor([1.0 - one for one in weights[1:]])
    excess = weight[:-1, None] * target_probs[1:-1] - draft_probs[1:]
    mass = excess.clamp_min(0.0).sum(dim=-1)  # r_i
    total = mass + complement[:-1]
    rejection = torch.where(total > 0.0, complement[:-1] / total, 0.0)
    return torch.cat((rejection, complement[-1:]))


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """Returns each draft token's acceptance probability: min(1, target / draft) at the token.

    Leviathan et al. 2023, Algorithm 1. Shapes: target_probs, draft_probs [N, V], tokens [N] -> [N].
    """
    return probability_ratio(target_probs, draft_probs, tokens).clamp_max(1.0)


def probability_ratio(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """Returns target / draft at each draft token; 0 if target is 0, or if either is NaN.

    Shapes: target_probs, draft_probs [N, V], tokens [N] -> [N].
    """
    at_target = target_probs.gather(-1, tokens[:, None])[:, 0]
    at_draft = draft_probs.gather(-1, tokens[:, None])[:, 0]
    smallest = torch.finfo(at_draft.dtype).tiny  # a token that target excludes is never accepted
    return (at_target / at_draft.clamp_min(smallest)).nan_to_num(0.0, posinf=torch.inf)


def residual(target_probs: Tensor, draft_probs: Tensor, weight: float = 1.0) -> Tensor:
    """Returns Norm[(weight target - draft)+], or target if that is zero everywhere.

    Shapes: [V], [V] -> [V].
    """
    excess = (weight * target_probs - draft_probs).clamp_min(0.0)
    total = excess.sum()
    return torch.where(total > 0.0, excess / total, target_probs)


def draft_rows(proposal: Proposal, like: Tensor) -> Tensor:
    """Returns the distribution that each token was drawn from, in the type of `like`.

    Shapes: like [..., V] -> [N, V].
    """
    if proposal.draft_probs is None:
        return point_masses(proposal.tokens, like)
    rows = proposal.draft_probs.to(like)
    return rows if proposal.rows is None else rows[proposal.rows.to(rows.device)]


def point_masses(tokens: Tensor, like: Tensor) -> Tensor:
    """Returns the point mass on each token. Shapes: tokens [N], like [..., V] -> [N, V]."""
    points = like.new_zeros(len(tokens), like.shape[-1])
    return points.scatter_(-1, tokens.to(like.device)[:, None], 1.0)


def _verdict(path: list[int], best: list[int], drafted: list[int]) -> Verdict:
    """Returns a path with the arg-max of the row after it. Raises NotFinite if it has none."""
    row = path[-1] + 1 if path else 0
    if best[row] < 0:
        raise NotFinite(
            f"the target's logits in row {row} of {len(best)} are not finite: the model gave NaN "
            "or infinity, or a logits processor excluded every token; load it in float32 or "
            "bfloat16"
        )
    return Verdict(torch.tensor(path, dtype=torch.long), best[row], drafted=drafted)
