"""Speculative cascades: rejection sampling against a mixture of drafter and target; lossy.

"Faster Cascades via Speculative Decoding" (Narasimhan et al., ICLR 2025, arXiv 2405.19261). A
deferral rule r says where the target decides. With q the drafter's row and p the target's, outputs
follow

    pi(v) = q(v) (1 - r(v)) + p(v) sum_u r(u) q(u)

the target distribution of the token-specific rules, which is q or p where r is the same for all
tokens (chow, diff, opt). Equation numbers of rules are those that the comments of the authors' own
code give (google-research/speculative_cascades). As there, a rule looks at rows before temperature,
at temperature 0 too, and rows are mixed as they are decoded from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import exact_enough, warp
from drafttrain.decoding.types import Proposal, Sampling, Verdict
from drafttrain.decoding.verifiers import acceptance_probability, draft_rows, residual


def verify_deferral(
    proposal: Proposal,
    target_logits: Tensor,
    sampling: Sampling,
    randomness: Randomness,
    rule: str,
    alpha: float,
) -> Verdict:
    """Accept with probability min(1, pi / draft); else sample Norm[(pi - draft)+]. Lossy.

    Leviathan et al. 2023, Algorithm 1, with pi in the place of target, as in Narasimhan et al.
    2025: every token behind a drafted prefix follows pi exactly. Nothing follows a draft
    that is accepted whole, since pi there needs a row that the drafter has not made; the next round
    drafts it. Where nothing is drafted, target decides. At temperature 0 the rows that are mixed
    are point masses: the drafter's choice, or the target's arg-max.

    Shapes: target_logits [N, V], row i for token i; a row behind the last token is not looked at.
    Raises ValueError for a draft that comes without the drafter's rows.
    """
    drafted = len(proposal.tokens)
    if drafted == 0:
        target_probs = warp(target_logits[:1], sampling)
        return Verdict(torch.arange(0), int(randomness.categorical(target_probs)), target_probs)
    tokens = proposal.tokens.to(target_logits.device)
    rows = rows_of(proposal, target_logits[:drafted], sampling)
    mixed = mix(rows, defers(rule, alpha, rows))
    draft_probs = draft_rows(proposal, tokens, mixed)
    accepted = randomness.accept_run(acceptance_probability(mixed, draft_probs, tokens))
    if accepted == drafted:
        return Verdict(torch.arange(drafted), None, mixed)
    left = residual(mixed[accepted], draft_probs[accepted])
    next_token = int(randomness.categorical(left[None]))
    return Verdict(torch.arange(accepted), next_token, mixed[: accepted + 1])


@dataclass(frozen=True)
class Rows:
    """Of every drafted token, what the rules look at and what is mixed. Shapes: [N, V] each."""

    target: Tensor
    """p before temperature, after the target's own logits processors."""
    draft: Tensor
    """q before temperature."""
    target_probs: Tensor
    """p as it is decoded from."""
    draft_probs: Tensor
    """q as tokens were drawn from it; a point mass in greedy decoding."""


def rows_of(proposal: Proposal, target_logits: Tensor, sampling: Sampling) -> Rows:
    """The rows of a draft. Tokens that the target's processors exclude are left out of q too, as no
    rule may emit them; where nothing is left of q, it is p. Shapes: target_logits [N, V]."""
    if proposal.logits is None:
        raise ValueError("deferral goes by the drafter's own rows, which this draft comes without")
    scores = exact_enough(target_logits)
    draft_logits = torch.stack(list(proposal.logits())).to(scores)
    target_probs = warp(scores, sampling)
    tokens = proposal.tokens.to(scores.device)
    return Rows(
        target=scores.softmax(dim=-1),
        draft=_among(scores, draft_logits.softmax(dim=-1), scores.softmax(dim=-1)),
        target_probs=target_probs,
        draft_probs=_among(scores, draft_rows(proposal, tokens, target_probs), target_probs),
    )


def _among(scores: Tensor, probs: Tensor, otherwise: Tensor) -> Tensor:
    """Probabilities of tokens whose scores are not -inf, normalised; where there are none, others.

    Rows without such a score stay as they are, to the bit. Shapes: [N, V] each -> [N, V].
    """
    allowed = scores > -torch.inf
    kept = probs * allowed
    total = kept.sum(dim=-1, keepdim=True)
    normalised = torch.where(total > 0.0, kept / total, otherwise)
    return torch.where(allowed.all(dim=-1, keepdim=True), probs, normalised)


def defers(rule: str, alpha: float, rows: Rows) -> Tensor:
    """r: where the target decides. Shapes: [N, 1] for all tokens of a row, or [N, V].

    chow      max q < 1 - alpha                        (Equation 2)
    diff      max q < max p - alpha                    (Equation 5)
    opt       max q < max p - alpha D_TV(p, q)         (Equation 10)
    token-v1  q(v) < max p - alpha                     (Equation 13)
    token-v2  p(v) < max p - alpha                     (Equation 14)
    token-v3  p(v) < (1 - alpha) max p                 (Equation 15)

    D_TV is of the rows as they are decoded from: the probability that p would reject a draft token.
    """
    surest_draft = rows.draft.amax(dim=-1, keepdim=True)
    surest = rows.target.amax(dim=-1, keepdim=True)
    match rule:
        case "chow":
            return surest_draft < 1.0 - alpha
        case "diff":
            return surest_draft < surest - alpha
        case "opt":
            return surest_draft < surest - alpha * _total_variation(rows)
        case "token-v1":
            return rows.draft < surest - alpha
        case "token-v2":
            return rows.target < surest - alpha
        case "token-v3":
            return rows.target < (1.0 - alpha) * surest
    raise ValueError(f"there is no deferral rule {rule!r}")


def mix(rows: Rows, deferred: Tensor) -> Tensor:
    """pi: q where r is 0, and p with all the probability that q has where r is 1.

    Shapes: deferred [N, 1] or [N, V] -> [N, V].
    """
    kept = torch.where(deferred, 0.0, rows.draft_probs)
    handed_over = torch.where(deferred, rows.draft_probs, 0.0).sum(dim=-1, keepdim=True)
    return kept + rows.target_probs * handed_over


def _total_variation(rows: Rows) -> Tensor:
    """sum (q - p)+ of each row. Shapes: [N, V] -> [N, 1]."""
    excess = (rows.draft_probs - rows.target_probs).clamp_min(0.0)
    return excess.sum(dim=-1, keepdim=True)
